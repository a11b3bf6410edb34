import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { settle } from "../testing/browser";
import { delta, FakeServer, toolEvent, toolRun, type Reply } from "../testing/fake_server";
import { messageFor } from "../testing/messages";
import type { Message, MadeCall } from "../types";
import { Answer } from "./answer";
import { exportChats, importChats, newChat, openChat, remove } from "./chats";
import { reading } from "./db";
import { runs } from "./runs";
import { settings } from "./settings";
import { continueAnswer, send } from "./talk";
import { allowAll, choice, choose, decide, readTools, stopCall, tools } from "./tools";

let fake: FakeServer;
const APPROVE = "POST /v1/chat/completions/chatcmpl-1/approve";
const DONE = [delta({}, "stop"), "[DONE]"];

const LISTED = [
  {
    tool: "read_file", display_name: "Read file", type: "server", permissions: { write: false },
    definition: { type: "function", function: { name: "read_file", description: "Reads.", parameters: {} } },
  },
  { tool: "w_get", display_name: "get", type: "mcp", mcp_server: "w", permissions: { write: true }, definition: {} },
];

/** An answer that looks something up, and then says what it has found. */
const LOOKED_UP = [
  toolEvent("step", { step: 1 }),
  delta({ reasoning_content: "Where?" }),
  delta({ content: "I will look." }),
  ...toolRun("a", "read_file", '{"path": "a.txt"}', "Hello"),
  ...toolRun("b", "w_get", "no JSON", '{"error":"The arguments are not JSON."}'),
  toolEvent("step", { step: 2 }),
  delta({ content: "It says " }),
  delta({ content: "hello." }),
  toolEvent("end", { reason: "answer", steps: 2, messages: [] }),
  ...DONE,
];

const ASKS = [
  toolEvent("step", { step: 1 }),
  toolEvent("call", { call_id: "a", tool: "edit_file", display_name: "Edit file", arguments: "{}", writes: true }),
  toolEvent("approval", { call_id: "a", preview: "+more" }),
];

beforeEach(async () => {
  fake = new FakeServer();
  fake.routes.set("GET /tools", () => ({ body: LISTED }));
  fake.routes.set(APPROVE, () => ({ body: { success: true } }));
  fake.install();
  newChat();
  await readTools(true);
});

const path = () => openChat.peek()!.path;
const last = (): Message => path()[path().length - 1]!;
const bodies = () => fake.asked.filter((asked) => asked.path === "/v1/chat/completions").map(({ body }) => body);
const phase = () => runs.peek().get(openChat.peek()!.chat.id)?.phase;

async function until(fits: () => unknown): Promise<void> {
  const began = Date.now();
  while (!(await fits())) {
    assert.ok(Date.now() - began < 10_000, "it did not come to pass");
    await settle(1);
  }
}

function says(chunks: string[]): void {
  fake.onSession = (session) => {
    for (const chunk of chunks) session.event(chunk);
    if (chunks.includes("[DONE]")) session.end();
  };
}

async function ask(chunks = LOOKED_UP): Promise<void> {
  says(chunks);
  await send("Read a.txt", []);
  await until(() => runs.peek().size === 0);
}

test("the tools of the server are known, and gone when it has none", async () => {
  assert.deepEqual(tools.peek(), [
    { name: "read_file", title: "Read file", description: "Reads.", origin: "", writes: false },
    { name: "w_get", title: "get", description: "", origin: "w", writes: true },
  ]);
  await readTools(false);
  assert.deepEqual(tools.peek(), []);
});

test("a question goes with the tools that are on in its chat, as far as the server has them", async () => {
  await ask();
  await choose({ on: ["read_file", "gone"], cwd: " /srv " });
  await ask();
  settings.value = { ...settings.peek(), tools: { on: ["w_get"], allowed: [], cwd: "" } };
  newChat();
  await ask();
  await choose({ on: [] });
  await ask();
  settings.value = { ...settings.peek(), tools: { on: [], allowed: [], cwd: "" } };
  assert.deepEqual(bodies().map((body) => body.trioserve_run_tools), [
    undefined,
    { tools: ["read_file"], approval: "ask", cwd: "/srv" },
    { tools: ["w_get"], approval: "ask" },
    undefined,
  ]);
});

test("steps belong to the answer, are kept with it, and are sent to the model with the next question", async () => {
  await ask();
  const { content, reasoning, steps, state } = (await reading((tx) => tx.message(last().id)))!;
  assert.deepEqual([content, reasoning, state], ["It says hello.", "", "done"]);
  const call = { title: "The read_file", writes: false, state: "done", output: "", seconds: 0.25 };
  const bad = { ...call, id: "b", name: "w_get", title: "The w_get", arguments: "no JSON" };
  assert.deepEqual(steps, [
    {
      content: "I will look.",
      reasoning: "Where?",
      calls: [
        { ...call, id: "a", name: "read_file", arguments: '{"path": "a.txt"}', result: "Hello" },
        { ...bad, result: '{"error":"The arguments are not JSON."}' },
      ],
    },
  ]);
  await ask();
  assert.deepEqual(bodies()[1].messages.slice(1, -1), [
    {
      role: "assistant",
      content: "I will look.",
      reasoning_content: "Where?",
      tool_calls: [
        { id: "a", type: "function", function: { name: "read_file", arguments: '{"path": "a.txt"}' } },
        { id: "b", type: "function", function: { name: "w_get", arguments: "{}" } },
      ],
    },
    { role: "tool", tool_call_id: "a", name: "read_file", content: "Hello" },
    { role: "tool", tool_call_id: "b", name: "w_get", content: '{"error":"The arguments are not JSON."}' },
    { role: "assistant", content: "It says hello." },
  ]);
});

test("an answer with steps does not depend on where it was saved and resumed", () => {
  const events = LOOKED_UP.filter((event) => event !== "[DONE]").map((event) => JSON.parse(event));
  const stream = { conversation: "c.1", offset: 0, startedAt: 1 };
  const empty = { ...messageFor({ role: "assistant", state: "writing" }), stream };
  const taken = (message: typeof empty, some: typeof events, from: number) => {
    const answer = new Answer(message);
    some.forEach((event, index) => answer.take(event, from + index + 1, 1));
    return answer.message(0) as typeof empty;
  };
  const whole = taken(empty, events, 0);
  assert.equal(whole.content, "It says hello.");
  for (let cut = 0; cut <= events.length; cut++) {
    const saved = structuredClone(taken(empty, events.slice(0, cut), 0));
    assert.deepEqual(taken(saved, events.slice(cut), cut), whole);
  }
});

test("output grows to a bound, and a result takes its place", () => {
  const stream = { conversation: "c.1", offset: 0, startedAt: 1 };
  const answer = new Answer({ ...messageFor({ role: "assistant", state: "writing" }), stream });
  const take = (text: string) => answer.take(JSON.parse(text), 1);
  const call = () => answer.message(0).steps![0]!.calls[0] as MadeCall;
  [...ASKS.slice(0, 2), toolEvent("started", { call_id: "a" })].forEach(take);
  assert.deepEqual([answer.phase, answer.note], ["running-tools", "Edit file"]);
  for (let i = 0; i < 100; i++) take(toolEvent("output", { call_id: "a", text: `${i}`.padEnd(1000) }));
  assert.ok(call().output!.length < 40_000 && call().output!.trimEnd().endsWith("99"));
  take(toolEvent("result", { call_id: "a", content: "all", is_error: true, diff: "+x", seconds: 1, stopped: true }));
  assert.deepEqual([call().state, call().output, call().result, call().diff], ["stopped", "", "all", "+x"]);
  take(toolEvent("something new", { call_id: "a" }));
  assert.equal(answer.phase, "prompt");
});

test("a person is asked, and what they say is sent", async () => {
  says(ASKS);
  await send("Edit it", []);
  await until(() => phase() === "asking");
  const { id } = last();
  await until(async () => (await reading((tx) => tx.message(id)))!.steps?.[0]?.calls[0]!.state === "asked");
  const [session] = fake.sessions.values();
  await decide("chatcmpl-1", "a", false);
  session!.event(toolEvent("denied", { call_id: "a", reason: "" }));
  session!.event(toolEvent("result", { call_id: "a", content: "no", is_error: true, seconds: 0, stopped: false }));
  DONE.forEach((event) => session!.event(event));
  session!.end();
  await until(() => runs.peek().size === 0);
  assert.deepEqual(last().steps![0]!.calls[0]!.state, "denied");
  assert.deepEqual(fake.asked.filter((one) => one.path.endsWith("/approve")).map(({ body }) => body), [
    { call_id: "a", approve: false },
  ]);
});

test("who allows all calls of a tool in a chat is not asked again there", async () => {
  const allowed = () => fake.count(APPROVE);
  says(ASKS);
  await send("Edit it", []);
  await until(() => phase() === "asking");
  const step = { content: "", reasoning: "", calls: [asked("a", "edit_file"), asked("b", "other")] };
  await allowAll(openChat.peek()!.chat.id, "chatcmpl-1", step, "edit_file");
  assert.deepEqual([allowed(), choice.peek().allowed], [1, ["edit_file"]]);
  await send("Once more", []);
  await until(() => allowed() === 2);
  newChat();
  await send("In another chat", []);
  await until(() => phase() === "asking");
  assert.equal(allowed(), 2);
  for (const chat of runs.peek().keys()) await remove(chat);
});

function asked(id: string, name: string): MadeCall {
  return { id, name, title: name, arguments: "{}", writes: true, state: "asked" };
}

test("a call that was decided in another tab is no error; one that is gone is", async () => {
  const replies: Reply[] = [409, 404].map((status) => ({ status, body: { error: { message: "Gone.", code: status } } }));
  fake.next(APPROVE, ...replies);
  await decide("chatcmpl-1", "a", true);
  await assert.rejects(decide("chatcmpl-1", "a", true), /Gone/);
  await assert.rejects(stopCall(undefined, "a"), /The answer has ended/);
});

test("an answer that has used up its steps continues after its results", async () => {
  const used = LOOKED_UP.slice(0, 6);
  await ask([...used, toolEvent("end", { reason: "max_steps", steps: 1, messages: [] }), delta({}, "length"), "[DONE]"]);
  const { id, finish, steps } = last();
  assert.deepEqual([finish, steps!.length], ["max_steps", 1]);
  says([...LOOKED_UP.slice(9)]);
  await continueAnswer(id);
  await until(() => runs.peek().size === 0);
  assert.equal(bodies()[1].messages.at(-1).role, "tool");
  assert.equal("continue_final_message" in bodies()[1], false);
  assert.deepEqual([last().id, last().content, last().steps!.length], [id, "It says hello.", 1]);
});

test("steps survive an export; what a model may do here is not up to a file", async () => {
  await choose({ on: ["read_file"], allowed: ["w_get"], cwd: "/" });
  await ask();
  const { steps } = last();
  const { chat } = openChat.peek()!;
  const file = await exportChats([chat.id]);
  await remove(chat.id);
  assert.equal(await importChats(file), 1);
  const imported = (await reading((tx) => tx.messagesOf(chat.id))).find(({ role }) => role === "assistant")!;
  assert.deepEqual(imported.steps, steps);
  assert.equal((await reading((tx) => tx.chat(chat.id)))!.tools, undefined);
});
