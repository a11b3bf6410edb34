import assert from "node:assert/strict";
import { test } from "node:test";

import "../testing/browser";
import { answered, FakeServer } from "../testing/fake_server";
import { chats, exportChats, importChats, newChat, open, openChat, remove } from "./chats";
import { storage } from "./db";
import { runs } from "./runs";
import { send } from "./talk";
import { hasUnkept } from "./unkept";

const fake = new FakeServer();
fake.onSession = (session) => answered(session, ["yes"]);
fake.install();

const texts = () => openChat.peek()!.path.map(({ content }) => content);

async function say(text: string): Promise<void> {
  await send(text, []);
  while (runs.peek().size > 0) await new Promise((resolve) => setTimeout(resolve, 5));
}

test("when storage is full, the page reports it and continues", async () => {
  newChat();
  await say("before");
  const first = openChat.peek()!.chat.id;
  const file = await exportChats();

  const { put } = IDBObjectStore.prototype;
  IDBObjectStore.prototype.put = () => {
    throw new DOMException("No room.", "QuotaExceededError");
  };
  await say("during");
  assert.deepEqual(texts(), ["before", "yes", "during", "yes"]);
  assert.equal(storage.peek(), "full");
  newChat();
  await say("another");
  assert.deepEqual(texts(), ["another", "yes"]);
  await assert.rejects(importChats(new Blob([(await file.text()).replaceAll(first, "copy")])), /full/);

  const second = openChat.peek()!.chat.id;
  await open(first);
  assert.deepEqual(texts(), ["before", "yes", "during", "yes"]);
  await open(second);
  assert.deepEqual(texts(), ["another", "yes"]);

  IDBObjectStore.prototype.put = put;
  await say("after");
  assert.equal(storage.peek(), "kept");
  assert.equal(hasUnkept(), false);
  await open(first);
  assert.deepEqual(texts(), ["before", "yes", "during", "yes"]);
  assert.equal(await open(second), true);
  assert.deepEqual(texts(), ["another", "yes", "after", "yes"]);
  await remove(second);
  assert.deepEqual(chats.peek().map(({ id }) => id), [first]);
});
