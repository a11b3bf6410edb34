import "../testing/browser";
import { sessionStorageFake } from "../testing/window";

import assert from "node:assert/strict";
import { test } from "node:test";

import { effect } from "@preact/signals";

import { newChat } from "../state/chats";
import { look, retryNow } from "../state/server";
import { change, openChat } from "../state/shown";
import { place } from "../state/storage";
import { FakeServer } from "../testing/fake_server";
import type { Message } from "../types";
import { attach, attachText, detach, draft, isAttaching, setDraft, startDrafts } from "./draft";

sessionStorageFake.setItem(place("drafts"), '[["","from before the reload"],["other","of another chat"]]');
setDraft({ text: "written before the chat is there" });
newChat();
startDrafts();

/** Put the first message into the open chat. */
async function begin(id: string): Promise<string> {
  const chat = openChat.peek()?.chat.id ?? "";
  const message: Message = {
    id, chat, parent: null, role: "user", content: "Hi", reasoning: "", toolCalls: [],
    attachments: [], model: "", createdAt: 1, state: "done",
  };
  await change(chat, { leaf: id }, [message]);
  return chat;
}

test("what was being written is there again after a reload, and what was written since", () => {
  assert.equal(draft.value.text, "from before the reload\nwritten before the chat is there");
});

test("another new chat has the same draft", () => {
  setDraft({ text: "not sent yet" });
  newChat();
  assert.equal(draft.value.text, "not sent yet");
});

test("a draft stays with its chat", async () => {
  setDraft({ text: "" });
  const chat = await begin("m1");
  setDraft({ text: "a second question" });
  newChat();
  assert.equal(draft.value.text, "");
  setDraft({ text: "something new" });
  const kept = new Map(JSON.parse(sessionStorageFake.getItem(place("drafts")) ?? ""));
  assert.equal(kept.get(""), "something new");
  assert.equal(kept.get(chat), "a second question");
  assert.equal(kept.get("other"), "of another chat");
});

test("what is written while the first message is kept goes along with the chat", async () => {
  newChat();
  setDraft({ text: "and by the way" });
  await begin("m2");
  assert.equal(draft.value.text, "and by the way");
  newChat();
  assert.equal(draft.value.text, "");
});

test("files are attached to the chat that was open, and taken out again", async () => {
  newChat();
  const seen: boolean[] = [];
  const end = effect(() => void seen.push(isAttaching.value));
  await attach([new File(["one"], "1.txt"), new File([new Uint8Array([0])], "no.bin"), new File(["two"], "2.txt")]);
  end();
  assert.deepEqual(seen, [false, true, false]);
  assert.deepEqual(draft.value.attachments.map((one) => one.name), ["1.txt", "2.txt"]);
  detach(draft.value.attachments[0]?.id ?? "");
  assert.deepEqual(draft.value.attachments.map((one) => one.text), ["two"]);
  const pasted = attachText("drei ä");
  assert.deepEqual(draft.value.attachments.map((one) => one.size), [3, 7]);
  detach(pasted);
  assert.equal(draft.value.attachments.length, 1);
});

test("what was attached before the server says what it takes is judged then", async () => {
  newChat();
  const fake = new FakeServer();
  const answers = (modalities: object) => {
    fake.routes.set("GET /props", () => ({ body: { default_generation_settings: { params: {} }, modalities, takes_pdf: false } }));
  };
  fake.routes.set("GET /health", () => ({ body: {} }));
  fake.routes.set("GET /v1/models", () => ({ body: { data: [{ id: "small" }] } }));
  fake.install();
  const names = () => draft.value.attachments.map((one) => one.name);
  for (const { id } of draft.value.attachments) detach(id);
  const heard = new File([new Uint8Array([0])], "a.webm", { type: "audio/webm" });
  const seen = new File([new Uint8Array([0])], "b.webm", { type: "video/webm" });
  const drawn = new File(["<svg/>"], "c.svg", { type: "image/svg+xml" });
  await attach([heard, seen, drawn, new File(["%PDF-1.4"], "d.pdf")]);
  assert.deepEqual(names(), ["a.webm", "b.webm", "c.svg", "d.pdf"]);
  answers({ vision: false, audio: true, video: false });
  await look();
  assert.deepEqual(names(), ["a.webm", "c.svg"]);
  answers({ vision: false, audio: false, video: false });
  retryNow();
  await look();
  assert.deepEqual(names(), ["a.webm", "c.svg"]); // another model was chosen: a person decides
});
