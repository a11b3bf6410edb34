import assert from "node:assert/strict";
import { mock, test, type TestContext } from "node:test";

import { randomFrom } from "../testing/browser";
import { answered, delta, FakeServer } from "../testing/fake_server";
import type { ServerError } from "./api";
import { follow, stopStream, type End } from "./follow";

const POST = "POST /v1/chat/completions";
const GET = "GET /v1/stream";
const PIECES = ["Once", " upon", " a ", "tïme", " 🙂", " …", "\n\n", "end"];

interface Followed {
  text: string;
  end: End;
  offsets: number[];
  waits: ServerError[];
}

/** Time does not pass by itself in these tests: waits end at once. */
function withClock(t: TestContext): void {
  mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"] });
  t.after(() => mock.timers.reset());
}

async function inTime<T>(work: Promise<T>): Promise<T> {
  let isOver = false;
  const over = work.finally(() => (isOver = true));
  over.catch(() => undefined);
  for (let turn = 0; !isOver; turn++) {
    assert.ok(turn < 50_000, "it did not come to an end");
    await new Promise((resolve) => setImmediate(resolve));
    if (turn % 8 === 7) mock.timers.tick(200);
  }
  return over;
}

async function followed(
  signal = new AbortController().signal,
  offset = 0,
  body: Record<string, unknown> | null = { messages: [] },
): Promise<Followed> {
  const result = { text: "", offsets: [] as number[], waits: [] as ServerError[] };
  const listener = {
    onChunk(chunk: any, at: number) {
      result.text += chunk.choices[0]?.delta.content ?? "";
      result.offsets.push(at);
    },
    onComment: () => undefined,
    onConnected: () => undefined,
    onWaiting: (error: ServerError) => void result.waits.push(error),
  };
  const wanted = { conversation: "chat.1", offset, ...(body ? { body } : {}) };
  return { ...result, end: await inTime(follow(wanted, listener, signal)), ...result };
}

function server(): FakeServer {
  const fake = new FakeServer();
  fake.onSession = (session) => answered(session, PIECES);
  fake.install();
  return fake;
}

test("an answer is whole at any place where its connections are cut", async (t) => {
  withClock(t);
  const { bytes } = await lengthOfAnswer();
  for (let cut = 0; cut <= bytes; cut += 3) {
    const fake = server();
    fake.next(POST, { cutAfter: cut });
    const { text, end } = await followed();
    assert.deepEqual([text, end.kind], [PIECES.join(""), "complete"], `cut after ${cut}`);
  }
});

test("and however often", async (t) => {
  withClock(t);
  const random = randomFrom(3);
  for (let round = 0; round < 20; round++) {
    const fake = server();
    fake.chunkSize = () => random() * 40;
    const cuts = Array.from({ length: 25 }, () => ({ cutAfter: Math.floor(random() * 150) }));
    fake.next(POST, cuts[0]!);
    fake.next(GET, ...cuts.slice(1));
    const { text, end, offsets } = await followed();
    assert.deepEqual([text, end.kind], [PIECES.join(""), "complete"]);
    assert.deepEqual(offsets, [...new Set(offsets)].sort((a, b) => a - b));
  }
});

async function lengthOfAnswer(): Promise<{ bytes: number }> {
  const fake = server();
  await followed();
  return { bytes: fake.sessions.get("chat.1")!.bytes.length };
}

test("a POST without an answer is not repeated if it has arrived", async (t) => {
  withClock(t);
  const fake = server();
  fake.next(POST, { isLost: true });
  const { text } = await followed();
  assert.equal(text, PIECES.join(""));
  assert.deepEqual([fake.count(POST), fake.count(GET)], [1, 1]);
});

test("and is repeated if it has not", async (t) => {
  withClock(t);
  const fake = server();
  fake.next(POST, { isAway: true });
  const { text } = await followed();
  assert.equal(text, PIECES.join(""));
  assert.deepEqual([fake.count(POST), fake.count(GET)], [2, 0]);
});

test("a full server is asked again when it says", async (t) => {
  withClock(t);
  const fake = server();
  const body = { error: { message: "The queue is full.", code: "queue_full" } };
  fake.next(POST, { status: 429, headers: { "Retry-After": "7" }, body });
  const began = Date.now();
  const { text, waits } = await followed();
  assert.equal(text, PIECES.join(""));
  assert.deepEqual(waits.map(({ reason, retryAfter }) => [reason, retryAfter]), [["full", 7000]]);
  assert.ok(Date.now() - began >= 7000);
});

test("a server that loads its model, restarts, or is behind a proxy is waited for", async (t) => {
  withClock(t);
  const fake = server();
  const saying = (message: string) => ({ status: 503, body: { error: { message, code: 503 } } });
  fake.next(POST, saying("Loading model"), saying("The server is shutting down"), { status: 502 });
  const { text, waits } = await followed();
  assert.equal(text, PIECES.join(""));
  assert.deepEqual(waits.map(({ reason }) => reason), ["loading", "closing", "away"]);
});

test("what cannot get better ends it", async (t) => {
  withClock(t);
  for (const [status, message] of [[401, "Invalid API Key"], [400, "'top_k' must be an integer."], [500, "Internal error."]] as const) {
    const fake = server();
    fake.next(POST, { status, body: { error: { message, code: status } } });
    const { end } = await followed();
    assert.equal(end.kind, "failed");
    assert.equal(end.kind === "failed" && end.error.message, message);
    assert.equal(fake.count(POST), 1);
  }
});

test("a long Retry-After is said rather than waited for", async (t) => {
  withClock(t);
  const fake = server();
  fake.next(POST, { status: 429, headers: { "Retry-After": "3600" }, body: { error: { message: "Too much.", code: 429 } } });
  assert.equal((await followed()).end.kind, "failed");
});

test("an error within the stream ends it", async (t) => {
  withClock(t);
  const fake = server();
  fake.onSession = (session) => {
    session.event(delta({ content: "so far" }));
    session.event('{"error":{"message":"The server is shutting down","code":503}}');
    session.end();
  };
  const { text, end } = await followed();
  assert.equal(text, "so far");
  assert.equal(end.kind === "failed" && end.error.message, "The server is shutting down");
  assert.equal(fake.count(GET), 0);
});

test("a server that was restarted has lost the answer", async (t) => {
  withClock(t);
  const fake = server();
  fake.next(POST, { cutAfter: 120 });
  fake.next(GET, { isAway: true }, { status: 404, body: { error: { message: "unknown", code: 404 } } });
  assert.equal((await followed()).end.kind, "lost");
});

test("after a reload the server is asked whether it knows the answer, before it is read", async (t) => {
  withClock(t);
  const fake = server();
  const { offsets } = await followed();
  const { text, end } = await followed(undefined, offsets[2], null);
  assert.deepEqual([text, end.kind], [PIECES.slice(2).join(""), "complete"]);
  fake.sessions.clear();
  const reads = fake.count(GET);
  assert.equal((await followed(undefined, offsets[2], null)).end.kind, "lost");
  assert.equal(fake.count(GET), reads);
});

test("an answer whose next bytes were dropped has a gap", async (t) => {
  withClock(t);
  const fake = server();
  fake.onSession = (session) => {
    answered(session, PIECES);
    session.start = 500;
  };
  fake.next(POST, { cutAfter: 120 });
  assert.equal((await followed()).end.kind, "gap");
});

test("an answer that is no stream is not read as one", async (t) => {
  withClock(t);
  const fake = server();
  fake.next(POST, { status: 200, body: "Welcome to our hotel's network" });
  assert.equal((await followed()).end.kind, "failed");
});

test("a connection that says nothing for long is replaced", async (t) => {
  withClock(t);
  const fake = server();
  fake.onSession = (session) => {
    session.event(delta({ content: "still" }));
    setTimeout(() => {
      session.bytes = session.bytes.slice(); // the connection that waits is not told
      const { onMore } = session;
      session.onMore = [];
      answered(session, [" here"]);
      assert.equal(onMore.length, 1);
    }, 30_000);
  };
  const { text } = await followed();
  assert.equal(text, "still here");
  assert.equal(fake.count(GET), 1);
});

test("an aborted one throws at any stage", async (t) => {
  withClock(t);
  for (const reply of [{}, { isAway: true }, { status: 429, headers: { "Retry-After": "60" } }]) {
    const fake = server();
    fake.onSession = (session) => session.event(delta({ content: "a" }));
    fake.next(POST, reply);
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 2_000);
    await assert.rejects(followed(controller.signal), { name: "AbortError" });
  }
});

test("a stop reaches the server once the network is back", async (t) => {
  withClock(t);
  const fake = server();
  await followed();
  fake.next("DELETE /v1/stream", { isAway: true }, { isAway: true });
  await inTime(stopStream("chat.1"));
  assert.equal(fake.sessions.size, 0);
});
