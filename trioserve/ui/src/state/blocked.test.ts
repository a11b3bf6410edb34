import assert from "node:assert/strict";
import { test } from "node:test";

import { localStorageFake } from "../testing/browser";
import { answered, FakeServer } from "../testing/fake_server";
import { exportChats, newChat, open, openChat, search } from "./chats";
import { storage } from "./db";
import { runs } from "./runs";
import { settings, startSettings } from "./settings";
import { send } from "./talk";

test("in a window that may keep nothing, all works until it is closed", async () => {
  Object.defineProperty(globalThis, "indexedDB", {
    get: () => {
      throw new DOMException("The operation is insecure.", "SecurityError");
    },
  });
  const refuse = () => {
    throw new DOMException("The operation is insecure.", "SecurityError");
  };
  Object.assign(localStorageFake, { getItem: refuse, setItem: refuse });
  const fake = new FakeServer();
  fake.onSession = (session) => answered(session, ["yes"]);
  fake.install();

  startSettings();
  settings.value = { ...settings.peek(), theme: "dark" };
  newChat();
  await send("Are you there?", []);
  while (runs.peek().size > 0) await new Promise((resolve) => setTimeout(resolve, 5));
  const { id } = openChat.peek()!.chat;
  newChat();
  assert.equal(await open(id), true);
  assert.deepEqual(openChat.peek()!.path.map(({ content }) => content), ["Are you there?", "yes"]);
  assert.deepEqual((await search("YES")).map(({ chat: { id: found } }) => found), [id]);
  assert.match(await (await exportChats()).text(), /Are you there/);
  assert.equal(storage.peek(), "memory");
});
