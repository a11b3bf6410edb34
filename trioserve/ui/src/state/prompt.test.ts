import "../testing/browser";

import assert from "node:assert/strict";
import { test } from "node:test";

import { messageFor } from "../testing/messages";
import type { Message } from "../types";
import { bodyFor, withFiles } from "./prompt";

const user = (content: string, more: Partial<Message> = {}) => messageFor({ content, ...more });
const bot = (content: string, more: Partial<Message> = {}) =>
  messageFor({ role: "assistant", content, ...more });

function asked(path: Message[], more = {}): Promise<Record<string, any>> {
  return bodyFor({ system: "", sampling: {}, model: "", tools: {}, path, continues: false, ...more });
}

const rolesOf = (body: Record<string, any>) => body.messages.map((one: any) => [one.role, one.content]);

test("the body has the system prompt, the messages and what streams need", async () => {
  const body = await asked([user("Hi")], { system: "Be brief.", sampling: { top_k: 3, stream: false }, model: "m" });
  assert.deepEqual(rolesOf(body), [["system", "Be brief."], ["user", "Hi"]]);
  const { stream, top_k, model, return_progress, queue_comments } = body;
  assert.deepEqual([stream, top_k, model, return_progress, queue_comments], [true, 3, "m", true, true]);
  assert.equal("continue_final_message" in body, false);
  assert.equal("model" in (await asked([user("Hi")])), false);
});

test("roles take turns: answers without text are left out, and questions become one", async () => {
  const path = [user("a"), bot("", { state: "failed" }), user("b"), bot("c"), user("d")];
  assert.deepEqual(rolesOf(await asked(path)), [["user", "a\n\nb"], ["assistant", "c"], ["user", "d"]]);
});

test("an answer that is continued comes last, with its reasoning", async () => {
  const body = await asked([user("a"), bot("", { reasoning: "Let me" })], { continues: true });
  assert.deepEqual(body.messages[1], { role: "assistant", content: "", reasoning_content: "Let me" });
  assert.deepEqual([body.continue_final_message, body.add_generation_prompt], [true, false]);
});

test("calls are sent with their results, by the order of both", async () => {
  const toolCalls = [{ id: "1", name: "f", arguments: "{}" }, { id: "2", name: "g", arguments: "{}" }];
  const tool = (content: string) => messageFor({ role: "tool", content });
  const { messages } = await asked([user("a"), bot("", { toolCalls }), tool("x"), tool("y"), bot("z")]);
  assert.deepEqual(messages.map((one: any) => one.tool_call_id), [undefined, undefined, "1", "2", undefined]);
  assert.deepEqual(messages[1].tool_calls.map((one: any) => [one.id, one.function.name]), [["1", "f"], ["2", "g"]]);
});

test("calls without results are not sent", async () => {
  const toolCalls = [{ id: "1", name: "f", arguments: "{}" }];
  const { messages } = await asked([user("a"), bot("b", { toolCalls }), user("c")]);
  assert.equal(messages[1].tool_calls, undefined);
});

test("files come first, in fences that their text cannot close", async () => {
  const file = (text: string) => ({ id: "f", name: "a.md", type: "text/plain", size: 1, text });
  assert.equal(withFiles("Why?", [file("x\n")]), "File: a.md\n```\nx\n```\n\nWhy?");
  assert.equal(withFiles("", [file("````\nx")]), "File: a.md\n`````\n````\nx\n`````");
  assert.equal(withFiles("Why?", []), "Why?");
});

const PICTURE = { id: "p", name: "a.png", type: "image/png", size: 2, text: "", data: new Blob(["hi"], { type: "image/png" }) };
const SOUND = { ...PICTURE, name: "b.mp3", type: "audio/mpeg", data: new Blob(["hi"], { type: "audio/mpeg" }) };
const FILM = { ...PICTURE, name: "c.mp4", type: "video/mp4", data: new Blob(["hi"], { type: "video/mp4" }) };
const NOTE = { id: "n", name: "d.txt", type: "text/plain", size: 1, text: "x" };

test("pictures, sound and videos are parts before the text, and text files are in it", async () => {
  const { messages } = await asked([user("What?", { attachments: [PICTURE, NOTE, SOUND, FILM] })]);
  assert.deepEqual(messages[0].content, [
    { type: "image_url", image_url: { url: "data:image/png;base64,aGk=" } },
    { type: "input_audio", input_audio: { data: "aGk=", format: "mpeg" } },
    { type: "input_video", input_video: { data: "aGk=" } },
    { type: "text", text: "File: d.txt\n```\nx\n```\n\nWhat?" },
  ]);
});

test("a picture needs no text, and questions that become one keep theirs", async () => {
  const picture = { type: "image_url", image_url: { url: "data:image/png;base64,aGk=" } };
  const path = [user("", { attachments: [PICTURE] }), bot(""), user("a"), bot(""), user("b", { attachments: [PICTURE] })];
  const { messages } = await asked(path);
  const a = { type: "text", text: "a" };
  assert.deepEqual(messages.map((one: any) => one.content), [[picture, a, picture, { type: "text", text: "b" }]]);
});
