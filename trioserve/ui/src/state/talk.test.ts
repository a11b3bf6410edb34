import assert from "node:assert/strict";
import { after, beforeEach, test } from "node:test";

import { effect } from "@preact/signals";

import { settle } from "../testing/browser";
import { answered, delta, FakeServer } from "../testing/fake_server";
import { messageFor } from "../testing/messages";
import type { Message } from "../types";
import { chats, exportChats, importChats, live, newChat, open, openChat, remove, rename, search, setChat } from "./chats";
import { keepAnswer, reading, writing } from "./db";
import { checkOthers, isFollowing, look, runOf, runs, showRun } from "./runs";
import { settings } from "./settings";
import { loadChats, refresh } from "./shown";
import { endTabs, startTabs } from "./tabs";
import { continueAnswer, edit, regenerate, removeMessage, send, showBranch, stop } from "./talk";

let fake: FakeServer;
let count = 0;

beforeEach(() => {
  fake = new FakeServer();
  fake.onSession = (session) => answered(session, ["answer ", String(++count)]);
  fake.install();
  count = 0;
  newChat();
});

const path = () => openChat.peek()!.path;
const texts = () => path().map((message) => message.content);
const last = (): Message => path()[path().length - 1]!;
const chat = () => openChat.peek()!.chat;
const kept = (id: string) => reading((tx) => tx.message(id));

async function until(fits: () => boolean): Promise<void> {
  const began = Date.now();
  while (!fits()) {
    assert.ok(Date.now() - began < 20_000, "it did not come to pass");
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
}

const quiet = () => until(() => runs.peek().size === 0);

async function say(text: string): Promise<void> {
  await send(text, []);
  await quiet();
}

test("a message is sent, answered and kept", async () => {
  assert.equal(chats.peek().some(({ id }) => id === chat().id), false);
  await say("Hello there\nfriend");
  assert.deepEqual(texts(), ["Hello there\nfriend", "answer 1"]);
  assert.equal(chat().title, "Hello there");
  assert.equal(chats.peek()[0]!.id, chat().id);
  const { state, stream, stats, finish } = (await kept(last().id))!;
  assert.deepEqual([state, stream, finish, stats!.tokens], ["done", undefined, "stop", 2]);
  const [post] = fake.asked.filter(({ method }) => method === "POST");
  assert.match(post!.headers.get("X-Conversation-Id")!, new RegExp(`^${chat().id}\\.`));
  assert.deepEqual(post!.body.messages, [{ role: "user", content: "Hello there\nfriend" }]);
});

test("a message and its run are there at the same moment", async () => {
  const lengths: number[] = [];
  const end = effect(() => void lengths.push((openChat.value?.path.length ?? 0) - runs.value.size));
  const sent = send("x", []);
  await Promise.resolve();
  await Promise.resolve();
  assert.deepEqual([path().length, runs.peek().size], [2, 1]);
  await sent;
  await quiet();
  end();
  assert.ok(lengths.length > 1);
});

test("a conversation continues with the earlier messages", async () => {
  await say("one");
  await say("two");
  assert.deepEqual(texts(), ["one", "answer 1", "two", "answer 2"]);
  assert.deepEqual(fake.asked[1]!.body.messages.map((one: any) => one.content), ["one", "answer 1", "two"]);
});

test("a picture is sent, kept, and sent again; a missing one is reported", async () => {
  const data = new Blob(["hi"], { type: "image/png" });
  const picture = { id: "p", name: "a.png", type: data.type, size: 2, text: "", data };
  await send("", [picture]);
  await quiet();
  assert.equal(chat().title, "a.png");
  assert.equal(await (await kept(path()[0]!.id))!.attachments[0]!.data!.text(), "hi");
  await regenerate(last().id);
  await quiet();
  const part = { type: "image_url", image_url: { url: "data:image/png;base64,aGk=" } };
  assert.deepEqual(fake.asked.map(({ body }) => body.messages), [1, 2].map(() => [{ role: "user", content: [part] }]));
  data.arrayBuffer = () => Promise.reject(new DOMException("It is gone.", "NotReadableError"));
  await regenerate(last().id);
  await quiet();
  assert.deepEqual([last().state, last().error], ["failed", "The browser no longer has the file a.png."]);
});

test("what the chat asks for goes before the settings", async () => {
  settings.value = { ...settings.peek(), system: "general", sampling: { top_k: 1, top_p: 0.5 }, apiKey: " kéy " };
  await setChat(chat().id, { system: "special", sampling: { top_k: 2 } });
  await say("x");
  const { body, headers } = fake.asked[0]!;
  assert.deepEqual([body.messages[0].content, body.top_k, body.top_p], ["special", 2, 0.5]);
  assert.equal(Buffer.from(headers.get("Authorization")!, "latin1").toString("utf8"), "Bearer kéy");
  settings.value = { ...settings.peek(), system: "", sampling: {}, apiKey: "" };
});

test("regenerate, edit and show branches", async () => {
  await say("one");
  const first = last();
  await regenerate(first.id);
  await quiet();
  assert.deepEqual(texts(), ["one", "answer 2"]);
  assert.deepEqual(openChat.peek()!.branches.get(last().id), { index: 1, ids: [first.id, last().id] });
  await edit(path()[0]!.id, "other", []);
  await quiet();
  assert.deepEqual(texts(), ["other", "answer 3"]);
  await showBranch(openChat.peek()!.branches.get(path()[0]!.id)!.ids[0]!);
  assert.deepEqual(texts(), ["one", "answer 2"]);
  await showBranch(first.id);
  assert.deepEqual(texts(), ["one", "answer 1"]);
  await edit(first.id, "better", []);
  assert.deepEqual(texts(), ["one", "better"]);
  assert.equal(fake.count("POST /v1/chat/completions"), 3);
  const id = chat().id;
  newChat();
  assert.equal(await open(id), true);
  assert.deepEqual(texts(), ["one", "better"]);
});

test("an answer is shown while it comes, and a stop keeps the received part", async () => {
  fake.onSession = (session) => session.event(delta({ content: "half" }));
  await send("x", []);
  const { id } = last();
  await until(() => live(id)?.peek().content === "half");
  assert.equal(runs.peek().get(chat().id)!.phase, "writing");
  await stop(chat().id);
  assert.equal(runs.peek().size, 0);
  assert.equal(live(id), undefined);
  assert.deepEqual([last().content, last().state], ["half", "stopped"]);
  assert.equal((await kept(id))!.state, "stopped");
  await until(() => fake.count("DELETE /v1/stream") === 1);
  assert.equal(fake.sessions.size, 0);
});

test("who shows a message can tell by the object when it becomes live, and when it is no longer", async () => {
  const seen = new Map<Message, boolean>();
  const end = effect(() => {
    const message = openChat.value?.path[1];
    if (message && !seen.has(message)) seen.set(message, live(message.id) !== undefined);
  });
  await say("x");
  end();
  const [now, ...before] = [...seen.values()].reverse();
  assert.equal(now, false);
  assert.ok(before.includes(true));
});

test("a stopped answer continues where it ended", async () => {
  fake.onSession = (session) => session.event(delta({ content: "half " }));
  await send("x", []);
  const { id } = last();
  await until(() => live(id)?.peek().content === "half ");
  await stop(chat().id);
  fake.onSession = (session) => answered(session, ["whole"]);
  await continueAnswer(id);
  await quiet();
  assert.deepEqual([last().id, last().content, last().state], [id, "half whole", "done"]);
  const { body } = fake.asked.filter(({ path: its }) => its.endsWith("completions"))[1]!;
  assert.deepEqual(body.messages.map((one: any) => one.content), ["x", "half "]);
  assert.equal(body.continue_final_message, true);
});

test("after a reload the text continues without a gap or a repeat, from any offset", async () => {
  const pieces = ["Once ", "upon ", "ä ", "time"];
  fake.onSession = (session) => answered(session, pieces);
  await say("x");
  const whole = last();
  const [session] = [...fake.sessions.values()];
  const [conversation] = [...fake.sessions.keys()] as [string];
  const places: [number, string][] = [[0, ""]];
  let text = "";
  for (const [, data, id] of new TextDecoder().decode(session!.bytes).matchAll(/data: (.*)\nid: (\d+)/g)) {
    text += JSON.parse(data!).choices[0].delta.content ?? "";
    places.push([Number(id), text]);
  }
  for (const [offset, content] of places) {
    const stream = { conversation, offset, startedAt: 1 };
    const saved: Message = { ...whole, content, state: "writing", stream };
    await writing((tx) => tx.putMessage(saved));
    const connections = fake.count("GET /v1/stream");
    await Promise.all([look(), look()]);
    await quiet();
    assert.equal(fake.count("GET /v1/stream"), connections + 1);
    assert.deepEqual([last().content, last().state], ["Once upon ä time", "done"]);
    assert.equal((await kept(whole.id))!.content, "Once upon ä time");
  }
});

test("an answer that the server does not know any more keeps its text", async () => {
  await say("x");
  const stream = { conversation: "unknown", offset: 70, startedAt: 1 };
  await writing((tx) => tx.putMessage({ ...last(), content: "so far", state: "writing", stream }));
  await look();
  await quiet();
  assert.deepEqual([last().content, last().state], ["so far", "failed"]);
  assert.match(last().error!, /no longer has this answer/);
});

test("an error is in the answer, and the question stays", async () => {
  fake.next("POST /v1/chat/completions", { status: 400, body: { error: { message: "'top_k' must be an integer.", code: 400 } } });
  await say("x");
  assert.deepEqual([last().state, last().error], ["failed", "'top_k' must be an integer."]);
  await regenerate(last().id);
  await quiet();
  assert.deepEqual(texts(), ["x", "answer 1"]);
});

test("answers come for chats that are not open", async () => {
  const sessions: { end(): void }[] = [];
  fake.onSession = (session) => sessions.push({ end: () => answered(session, ["late"]) });
  await send("first", []);
  const { id } = chat();
  newChat();
  await send("second", []);
  assert.equal(runs.peek().size, 2);
  await until(() => sessions.length === 2);
  for (const session of sessions) session.end();
  await quiet();
  assert.deepEqual(texts(), ["second", "late"]);
  await open(id);
  assert.deepEqual(texts(), ["first", "late"]);
});

test("more answers than there are connections wait for each other", async () => {
  const sessions: { end(): void }[] = [];
  fake.onSession = (session) => sessions.push({ end: () => answered(session, ["done"]) });
  const ids: string[] = [];
  for (let i = 0; i < 7; i++) {
    newChat();
    await send(`${i}`, []);
    ids.push(chat().id);
  }
  await until(() => sessions.length === 4);
  await settle();
  const waiting = [...runs.peek().values()].filter(({ note }) => note?.startsWith("Waiting until"));
  assert.deepEqual([waiting.length, sessions.length], [3, 4]);
  for (let i = 0; i < 7; i++) {
    await until(() => sessions.length > i);
    sessions[i]!.end();
  }
  await quiet();
  for (const id of ids) {
    await open(id);
    assert.equal(last().content, "done");
  }
});

test("a long answer is saved now and then, not at each token", async () => {
  const pieces = Array.from({ length: 100_000 }, (_, i) => `w${i} `);
  fake.chunkSize = () => 1 << 16;
  fake.onSession = (session) => {
    const events = pieces.map((piece) => `data: ${delta({ content: piece })}\n\n`);
    session.add(events.join(""));
    session.add("data: [DONE]\n\n");
    session.end();
  };
  let saves = 0;
  const put = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = function (this: IDBObjectStore, value: unknown) {
    saves += 1;
    return put.call(this, value);
  };
  await send("long", []);
  await until(() => runs.peek().size === 0);
  IDBObjectStore.prototype.put = put;
  assert.equal(last().content, pieces.join(""));
  assert.ok(saves < 20, `${saves} saves`);
});

test("messages are deleted with what follows, and brought back", async () => {
  await say("one");
  await say("two");
  const before = texts();
  const undo = await removeMessage(path()[2]!.id);
  assert.deepEqual(texts(), ["one", "answer 1"]);
  assert.equal((await reading((tx) => tx.messagesOf(chat().id))).length, 2);
  await undo();
  assert.deepEqual(texts(), before);
  await regenerate(last().id);
  await quiet();
  await removeMessage(last().id);
  assert.deepEqual(texts(), before);
});

test("chats are renamed, found, deleted and brought back", async () => {
  await say("A needle in");
  const { id } = chat();
  await rename(id, "  Straw ");
  assert.equal(chats.peek().find((one) => one.id === id)!.title, "Straw");
  assert.deepEqual((await search("NEEDLE")).map(({ chat: { id: found } }) => found), [id]);
  assert.deepEqual((await search("straw")).map(({ chat: { id: found } }) => found), [id]);
  assert.deepEqual(await search("nothing of the kind"), []);
  const undo = await remove(id);
  assert.notEqual(chat().id, id);
  assert.equal(chats.peek().some((one) => one.id === id), false);
  assert.deepEqual(await reading((tx) => tx.messagesOf(id)), []);
  await undo();
  assert.equal(chat().id, id);
  assert.deepEqual(texts(), ["A needle in", "answer 1"]);
  assert.equal(chat().title, "Straw");
});

test("a chat that is deleted has its answer stopped", async () => {
  fake.onSession = (session) => session.event(delta({ content: "half" }));
  await send("x", []);
  await until(() => fake.sessions.size === 1);
  await remove(chat().id);
  await until(() => fake.sessions.size === 0);
  assert.equal(runs.peek().size, 0);
});

test("chats are exported and imported; those that are here stay as they are", async () => {
  await say("keep me");
  const { id } = chat();
  const file = await exportChats([id]);
  assert.equal(await importChats(file), 0);
  await remove(id);
  assert.equal(await importChats(file), 1);
  await open(id);
  assert.deepEqual(texts(), ["keep me", "answer 1"]);
  await say("more");
  assert.deepEqual(texts(), ["keep me", "answer 1", "more", "answer 2"]);
  await assert.rejects(importChats(new Blob(["{"])), /not JSON/);
});

test("a chat that is open is not one that was asked for later", async () => {
  await say("one");
  const first = chat().id;
  newChat();
  await say("two");
  const second = chat().id;
  const [, isThere] = await Promise.all([open(first), open("nowhere")]);
  assert.equal(isThere, false);
  await Promise.all([open(first), open(second)]);
  assert.equal(chat().id, second);
  const opening = open(first);
  newChat();
  await opening;
  assert.deepEqual(path(), []);
});

test("an answer is complete if only its last line was lost", async () => {
  fake.onSession = (session) => {
    session.event(delta({ content: "all" }));
    session.event(delta({}, "stop"));
    session.end();
  };
  fake.next("GET /v1/stream", { status: 404, body: { error: { message: "expired", code: 404 } } });
  await say("x");
  assert.deepEqual([last().content, last().state], ["all", "done"]);
});

// -- another tab, by what it does to the database and says on the channel

const other = () => new BroadcastChannel("trioserve/prefix/tabs");

function listen(): void {
  startTabs({
    onChanged: (id) => void refresh(id).then(look),
    onWritten: () => void look(),
    onRun: showRun,
    onBye: () => void checkOthers(0),
    onReading: () => undefined,
    isFollowing,
    runOf,
  });
}

after(endTabs);

test("an answer that another tab follows is shown, and left to it", async () => {
  await say("x");
  listen();
  const { id } = last();
  const tab = other();
  tab.onmessage = ({ data }) => {
    if (data.kind === "who") tab.postMessage({ kind: "me", asked: data.asked });
  };
  const save = async (fields: Partial<Message>) => {
    await writing((tx) => tx.putMessage({ ...path()[1]!, stats: undefined!, ...fields }));
    tab.postMessage({ kind: "changed", chat: chat().id });
  };
  const stream = { conversation: "theirs", offset: 0, startedAt: 1 };
  await save({ content: "", state: "writing", stream });
  await until(() => runs.peek().size === 1);
  const [question] = path();
  const run = { ...runs.peek().get(chat().id)!, phase: "queued", place: { position: 2 } };
  tab.postMessage({ kind: "run", run });
  await until(() => runs.peek().get(chat().id)?.place?.position === 2);
  await save({ content: "from there", state: "writing", stream: { ...stream, offset: 9 } });
  await until(() => live(id)?.peek().content === "from there");
  assert.equal(fake.count("GET /v1/stream"), 0);
  await save({ content: "from there, all", state: "done" });
  await quiet();
  assert.deepEqual([last().content, last().state], ["from there, all", "done"]);
  assert.equal(path()[0], question, "what has not changed is not drawn again");
  tab.close();
  endTabs();
});

test("another tab can ask which tab follows an answer, and its progress", async () => {
  listen();
  fake.onSession = (session) => session.event(delta({ content: "half" }));
  await send("x", []);
  const { id } = last();
  await until(() => runs.peek().get(chat().id)?.phase === "writing");
  const tab = other();
  const heard: { kind: string; asked?: string; run?: { message: string } }[] = [];
  tab.onmessage = ({ data }) => heard.push(data);
  tab.postMessage({ kind: "who", message: "unknown", asked: "1" });
  tab.postMessage({ kind: "who", message: id, asked: "2" });
  const isMe = ({ kind }: { kind: string }) => kind === "me";
  const isToldAfter = (at: number) => at >= 0 && heard.slice(at).some(({ run }) => run?.message === id);
  await until(() => isToldAfter(heard.findIndex(isMe)));
  assert.deepEqual(heard.filter(isMe), [{ kind: "me", asked: "2" }]);
  await stop(chat().id);
  tab.close();
  endTabs();
});

test("an answer whose tab is closed is followed here", async () => {
  await say("x");
  listen();
  const [conversation] = [...fake.sessions.keys()] as [string];
  const tab = other();
  tab.onmessage = ({ data }) => {
    if (data.kind === "who") tab.postMessage({ kind: "me", asked: data.asked });
  };
  const stream = { conversation, offset: 0, startedAt: 1 };
  await writing((tx) => tx.putMessage({ ...last(), content: "", state: "writing", stream }));
  tab.postMessage({ kind: "written" });
  await until(() => runs.peek().size === 1);
  assert.equal(fake.count("GET /v1/stream"), 0);
  tab.onmessage = null;
  tab.postMessage({ kind: "bye" });
  await quiet();
  assert.equal(fake.count("GET /v1/stream"), 1);
  assert.deepEqual([last().content, last().state], ["answer 1", "done"]);
  tab.close();
  endTabs();
});

test("an answer that another tab follows is stopped from here", async () => {
  await say("x");
  listen();
  const tab = other();
  tab.onmessage = ({ data }) => {
    if (data.kind === "who") tab.postMessage({ kind: "me", asked: data.asked });
  };
  const stream = { conversation: "theirs", offset: 7, startedAt: 1 };
  const half: Message = { ...last(), content: "half", state: "writing", stream };
  await writing((tx) => tx.putMessage(half));
  tab.postMessage({ kind: "written" });
  await until(() => runs.peek().size === 1);
  await stop(chat().id);
  assert.equal(runs.peek().size, 0);
  assert.deepEqual([last().content, last().state], ["half", "stopped"]);
  assert.equal((await kept(half.id))!.state, "stopped");
  const [stopped] = fake.asked.filter(({ method }) => method === "DELETE");
  assert.equal(stopped!.query.get("conv_id"), "theirs");
  tab.close();
  endTabs();
});

test("an answer that another tab stops ends here, as it was there", async () => {
  fake.onSession = (session) => session.event(delta({ content: "half" }));
  await send("x", []);
  const { id } = last();
  await until(() => live(id)?.peek().content === "half");
  const { stream: _, ...stopped } = { ...last(), content: "ha", state: "stopped" as const };
  await writing((tx) => tx.putMessage(stopped));
  for (const session of fake.sessions.values()) {
    session.event('{"error":{"message":"It was stopped.","code":500}}');
  }
  await quiet();
  assert.deepEqual([last().content, last().state, last().error], ["ha", "stopped", undefined]);
});

test("an answer that another tab stops ends here even if the server continues", async (t) => {
  t.mock.timers.enable({ apis: ["Date"] });
  fake.onSession = (session) => session.event(delta({ content: "half" }));
  await send("x", []);
  const { id } = last();
  const [session] = [...fake.sessions.values()];
  while (live(id)?.peek().content !== "half") await new Promise((resolve) => setTimeout(resolve, 5));
  const { stream: _, ...stopped } = { ...last(), content: "half", state: "stopped" as const };
  await writing((tx) => tx.putMessage(stopped));
  t.mock.timers.tick(2_000);
  (session ?? [...fake.sessions.values()][0]!).event(delta({ content: " more" }));
  while (runs.peek().size > 0) await new Promise((resolve) => setTimeout(resolve, 5));
  assert.deepEqual([last().content, last().state], ["half", "stopped"]);
});

test("a chat that another tab deletes stops being answered", async () => {
  fake.onSession = (session) => session.event(delta({ content: "half" }));
  await send("x", []);
  const { id } = chat();
  const session = [...fake.sessions.values()];
  await until(() => session.length > 0 || (session.push(...fake.sessions.values()), false));
  await writing(async (tx) => {
    for (const message of path()) await tx.deleteMessage(message.id);
    await tx.deleteChat(id);
  });
  answered(session[0]!, [" more"]);
  await quiet();
  assert.deepEqual(await reading((tx) => tx.messagesOf(id)), []);
  await refresh(id);
  assert.equal(openChat.peek(), null);
});

test("what another tab changes does not undo what is being done here", async () => {
  await say("one");
  const { id } = chat();
  const refreshed = refresh(id);
  await send("two", []);
  await refreshed;
  await quiet();
  assert.deepEqual(texts(), ["one", "answer 1", "two", "answer 2"]);
});

test("what another tab says in a chat is shown, and not forgotten by what is sent here", async () => {
  await say("one");
  const { id, leaf } = chat();
  const theirs = messageFor({ id: "theirs", chat: id, parent: leaf, role: "user", content: "from there" });
  await writing(async (tx) => {
    await tx.putMessage(theirs);
    await tx.putChat({ ...(await tx.chat(id))!, leaf: "theirs" });
  });
  await assert.rejects(send("two", []), /another tab/);
  assert.deepEqual(texts(), ["one", "answer 1", "from there"]);
  await say("two");
  assert.deepEqual(texts(), ["one", "answer 1", "from there", "two", "answer 2"]);
});

test("two tabs that follow the same answer do not spoil each other's work", async () => {
  await say("x");
  await loadChats();
  const { id } = last();
  const stream = { conversation: "c", offset: 50, startedAt: 1 };
  const ahead = messageFor({ id, chat: chat().id, state: "writing", content: "further", stream });
  await writing((tx) => tx.putMessage(ahead));
  const behind = { ...ahead, content: "fu", stream: { ...stream, offset: 20 } };
  assert.equal(await keepAnswer(behind, "c"), behind);
  assert.equal((await kept(id))!.content, "further");
  const done = { ...ahead, state: "done" as const, content: "further on" };
  await keepAnswer(done, "c");
  assert.equal((await keepAnswer(behind, "c"))!.content, "further on");
  assert.equal(await keepAnswer({ ...behind, id: "deleted" }, "c"), null);
});
