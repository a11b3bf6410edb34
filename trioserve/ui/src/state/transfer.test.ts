import assert from "node:assert/strict";
import { test } from "node:test";

import { randomFrom } from "../testing/browser";
import { chatFor, messageFor } from "../testing/messages";
import type { Message } from "../types";
import { read, written, type Whole } from "./transfer";
import { childrenOf, treeOf } from "./tree";

/** The parts of a chat that have to survive: all but the ids of its messages and files. */
async function form({ chat, messages }: Whole): Promise<unknown> {
  const tree = treeOf(messages);
  const below = (parent: string | null): Promise<unknown[]> =>
    Promise.all(
      childrenOf(tree, parent).map(async ({ id, parent: _, attachments, ...rest }) => ({
        ...rest,
        isLeaf: id === chat.leaf,
        attachments: await Promise.all(
          attachments.map(async ({ id: __, data, ...file }) => ({ ...file, data: await data?.text() })),
        ),
        below: await below(id),
      })),
    );
  const { leaf: _, ...about } = chat;
  return [about, await below(null)];
}

const text = async (wholes: readonly Whole[]) => (await written(wholes)).text();

function wholes(): Whole[] {
  const random = randomFrom(11);
  const texts = ["", "x", "zwei\nZeilen", "🙂 \u202e \u0000", "</script>", "__proto__"];
  const word = () => texts[Math.floor(random() * texts.length)]!;
  const picture = (its: string) => {
    const data = new Blob([its], { type: "image/png" });
    return { id: "p", name: "a.png", type: "image/png", size: data.size, text: "", data };
  };
  return Array.from({ length: 40 }, (_, c) => {
    const messages = Array.from({ length: Math.floor(random() * 20) }, (_, i): Message => {
      const before = Math.floor(random() * (i + 1)) - 1;
      return messageFor({
        id: `${c}-${i}`,
        chat: `chat-${c}`,
        parent: before < 0 ? null : `${c}-${before}`,
        role: random() < 0.5 ? "user" : "assistant",
        content: word(),
        reasoning: word(),
        createdAt: i,
        state: (["done", "stopped", "failed"] as const)[Math.floor(random() * 3)]!,
        toolCalls: random() < 0.2 ? [{ id: "1", name: word(), arguments: word() }] : [],
        attachments:
          random() < 0.2 ? [{ id: "f", name: word(), type: "text/plain", size: 3, text: word() }, picture(word())] : [],
        ...(random() < 0.3 ? { error: word(), finish: "length" } : {}),
      });
    });
    const leaf = messages[Math.floor(random() * messages.length)]?.id ?? null;
    const sampling = JSON.parse('{"temperature": 0.5, "__proto__": "own"}');
    return { chat: chatFor({ id: `chat-${c}`, title: word(), leaf, sampling }), messages };
  });
}

test("what is exported is imported as it was, with new ids of messages", async () => {
  const before = wholes();
  const after = read(await text(before));
  assert.deepEqual(await Promise.all(after.map(form)), await Promise.all(before.map(form)));
  const old = new Set(before.flatMap(({ messages }) => messages.map(({ id }) => id)));
  assert.ok(after.every(({ messages }) => messages.every(({ id }) => !old.has(id))));
  assert.equal(({} as Record<string, unknown>).own, undefined);
});

test("an answer that was still being written is one that was stopped", async () => {
  const stream = { conversation: "x", offset: 5, startedAt: 1 };
  const messages = [messageFor({ id: "a", role: "assistant", state: "writing", stream })];
  const [whole] = read(await text([{ chat: chatFor({ leaf: "a" }), messages }]));
  assert.equal(whole!.messages[0]!.state, "stopped");
  assert.equal(whole!.messages[0]!.stream, undefined);
});

const GOOD = async () => JSON.parse(
  await text([{ chat: chatFor({ leaf: "b" }), messages: [messageFor({ id: "a" }), messageFor({ id: "b", parent: "a" })] }]),
);

const BAD: [RegExp, (file: any) => void][] = [
  [/newer version/, (file) => (file.version = 2)],
  [/has no chats/, (file) => (file.format = "other")],
  [/chats is no list/, (file) => (file.chats = {})],
  [/chats\[0\] is no object/, (file) => (file.chats[0] = 5)],
  [/chats\[0\]\.title is no text/, (file) => (file.chats[0].title = {})],
  [/chats\[0\]\.leaf is no message/, (file) => (file.chats[0].leaf = "x")],
  [/chats\[0\]\.sampling/, (file) => (file.chats[0].sampling = { temperature: {} })],
  [/chats\[0\]\.createdAt is no time/, (file) => (file.chats[0].createdAt = 1e300)],
  [/messages has an id twice/, (file) => (file.chats[0].messages[1].id = "a")],
  [/messages\[1\]\.parent is no message/, (file) => (file.chats[0].messages[1].parent = "x")],
  [/messages\[0\]\.role/, (file) => (file.chats[0].messages[0].role = "root")],
  [/messages\[0\]\.content is no text/, (file) => (file.chats[0].messages[0].content = ["a"])],
  [/toolCalls\[0\] is no object/, (file) => (file.chats[0].messages[0].toolCalls = [null])],
  [/attachments\[0\]\.text/, (file) => (file.chats[0].messages[0].attachments = [{ name: "a" }])],
  [/attachments\[0\]\.data/, (file) => (file.chats[0].messages[0].attachments = [{ name: "a", data: "data:text/html;base64,eA==" }])],
  [/attachments\[0\]\.data/, (file) => (file.chats[0].messages[0].attachments = [{ name: "a", data: "data:image/png;base64,%" }])],
  [/lead back to themselves/, (file) => (file.chats[0].messages[0].parent = "b")],
];

test("a bad file is refused with the place", async () => {
  assert.equal(read(JSON.stringify(await GOOD())).length, 1);
  for (const [words, spoil] of BAD) {
    const file = await GOOD();
    spoil(file);
    assert.throws(() => read(JSON.stringify(file)), words);
  }
  for (const text of ["", "hello", "5", "null", "[]", "{}", '[{"conv": 3, "messages": []}]']) {
    assert.throws(() => read(text), /This file/);
  }
});

test("an id that no header could carry is replaced", async () => {
  const file = await GOOD();
  file.chats[0].id = "a\r\nX-Evil: 1";
  const [whole] = read(JSON.stringify(file));
  assert.match(whole!.chat.id, /^[\w-]+$/);
  assert.ok(whole!.messages.every(({ chat }) => chat === whole!.chat.id));
});

const THEIR_MESSAGES = [
  { id: "r", type: "root", role: "system", content: "", parent: null, timestamp: 1 },
  { id: "s", type: "text", role: "system", content: "Be brief.", parent: "r", timestamp: 2 },
  { id: "u", type: "text", role: "user", content: "Hi", parent: "s", timestamp: 3,
    extra: [{ type: "TEXT", name: "a.txt", content: "text" }, { type: "IMAGE", name: "i", base64Url: "x" },
      { type: "IMAGE", name: "b.png", base64Url: "data:image/png;base64,aGk=" },
      { type: "AUDIO", name: "c.wav", base64Data: "aGk=", mimeType: "audio/wav" }] },
  { id: "a", type: "text", role: "assistant", content: "Hello", parent: "u", timestamp: 4, reasoningContent: "hm",
    toolCalls: '[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]' },
];
const THEIR_CHAT = { id: "conv-1", name: "Greeting", lastModified: 9, currNode: "a" };

test("chats of llama-server's page are read, as JSON and as JSON lines", async () => {
  const lines = [{ type: "session", ...THEIR_CHAT }, ...THEIR_MESSAGES.map((message) => ({ type: "message", message }))];
  const asLines = lines.map((line) => JSON.stringify(line)).join("\n");
  const asJson = JSON.stringify([{ conv: THEIR_CHAT, messages: THEIR_MESSAGES }]);
  for (const text of [asLines, asJson, asJson.slice(1, -1)]) {
    const [{ chat, messages }, ...more] = read(text) as [Whole];
    assert.equal(more.length, 0);
    assert.deepEqual([chat.id, chat.title, chat.system, chat.updatedAt], ["conv-1", "Greeting", "Be brief.", 9]);
    const [user, answer] = messages as [Message, Message];
    assert.deepEqual([user.parent, answer.parent, chat.leaf], [null, user.id, answer.id]);
    assert.deepEqual(
      user.attachments.map(({ name, type, text: its }) => [name, type, its]),
      [["a.txt", "text/plain", "text"], ["b.png", "image/png", ""], ["c.wav", "audio/wav", ""]],
    );
    assert.deepEqual([answer.reasoning, answer.toolCalls], ["hm", [{ id: "1", name: "f", arguments: "{}" }]]);
  }
});
