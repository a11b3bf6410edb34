import assert from "node:assert/strict";
import { test } from "node:test";

import { messageFor } from "../testing/messages";
import type { Message } from "../types";
import { bodyFor, withFiles } from "./prompt";

const user = (content: string, more: Partial<Message> = {}) => messageFor({ content, ...more });
const bot = (content: string, more: Partial<Message> = {}) =>
  messageFor({ role: "assistant", content, ...more });

function asked(path: Message[], more = {}): Record<string, any> {
  return bodyFor({ system: "", sampling: {}, model: "", path, continues: false, ...more });
}

const rolesOf = (body: Record<string, any>) => body.messages.map((one: any) => [one.role, one.content]);

test("the body has the system prompt, the messages and what streams need", () => {
  const body = asked([user("Hi")], { system: "Be brief.", sampling: { top_k: 3, stream: false }, model: "m" });
  assert.deepEqual(rolesOf(body), [["system", "Be brief."], ["user", "Hi"]]);
  const { stream, top_k, model, return_progress, queue_comments } = body;
  assert.deepEqual([stream, top_k, model, return_progress, queue_comments], [true, 3, "m", true, true]);
  assert.equal("continue_final_message" in body, false);
  assert.equal("model" in asked([user("Hi")]), false);
});

test("roles take turns: answers without text are left out, and questions become one", () => {
  const path = [user("a"), bot("", { state: "failed" }), user("b"), bot("c"), user("d")];
  assert.deepEqual(rolesOf(asked(path)), [["user", "a\n\nb"], ["assistant", "c"], ["user", "d"]]);
});

test("an answer that is continued comes last, with its reasoning", () => {
  const body = asked([user("a"), bot("", { reasoning: "Let me" })], { continues: true });
  assert.deepEqual(body.messages[1], { role: "assistant", content: "", reasoning_content: "Let me" });
  assert.deepEqual([body.continue_final_message, body.add_generation_prompt], [true, false]);
});

test("calls are sent with their results, by the order of both", () => {
  const toolCalls = [{ id: "1", name: "f", arguments: "{}" }, { id: "2", name: "g", arguments: "{}" }];
  const tool = (content: string) => messageFor({ role: "tool", content });
  const { messages } = asked([user("a"), bot("", { toolCalls }), tool("x"), tool("y"), bot("z")]);
  assert.deepEqual(messages.map((one: any) => one.tool_call_id), [undefined, undefined, "1", "2", undefined]);
  assert.deepEqual(messages[1].tool_calls.map((one: any) => [one.id, one.function.name]), [["1", "f"], ["2", "g"]]);
});

test("calls without results are not sent", () => {
  const toolCalls = [{ id: "1", name: "f", arguments: "{}" }];
  const { messages } = asked([user("a"), bot("b", { toolCalls }), user("c")]);
  assert.equal(messages[1].tool_calls, undefined);
});

test("files come first, in fences that their text cannot close", () => {
  const file = (text: string) => ({ id: "f", name: "a.md", type: "text/plain", size: 1, text });
  assert.equal(withFiles("Why?", [file("x\n")]), "File: a.md\n```\nx\n```\n\nWhy?");
  assert.equal(withFiles("", [file("````\nx")]), "File: a.md\n`````\n````\nx\n`````");
  assert.equal(withFiles("Why?", []), "Why?");
});
