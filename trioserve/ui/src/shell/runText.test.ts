import assert from "node:assert/strict";
import { test } from "node:test";
import type { Run } from "../types";
import { announce, describeRun } from "./runText";

function run(change: Partial<Run>): Run {
  return { chat: "c", message: "m", phase: "sending", startedAt: 1000, ...change };
}

test("a place in the queue is shown with the remaining time, if that is known", () => {
  const place = (position: number, waitS?: number) =>
    describeRun(run({ phase: "queued", place: { position, waitS } }), 1000).text;
  assert.equal(place(1), "Next in the queue");
  assert.equal(place(1, 0.04), "Next in the queue");
  assert.equal(place(3, 2.12), "Number 3 in the queue, about 2.1 s");
  assert.equal(describeRun(run({ phase: "queued" }), 1000).text, "Waiting in the queue");
});

test("the progress of the prompt is shown, and its cached part", () => {
  const progress = { done: 2048, total: 8192, cached: 1000 };
  assert.deepEqual(describeRun(run({ phase: "prompt", progress }), 1000), {
    text: "Prefill 25% · 2,048 of 8,192 tokens, 1,000 from the cache", share: 0.25,
  });
  assert.equal(describeRun(run({ phase: "prompt" }), 1000).text, "Prefill…");
});

test("a long wait tells that time passes", () => {
  assert.equal(describeRun(run({}), 3900).text, "Waiting for the server…");
  assert.equal(describeRun(run({}), 6_400).text, "Waiting for the server, 5 s");
  assert.equal(describeRun(run({}), 121_400).text, "Waiting for the server, 2 min");
  assert.equal(describeRun(run({}), 13_400).text, "Waiting for the server, 12 s");
});

test("a model that loads has a share if the note tells it", () => {
  const loading = describeRun(run({ phase: "loading-model", note: "Loading the model, 40%" }), 1000);
  assert.equal(loading.share, 0.4);
  assert.equal(describeRun(run({ phase: "loading-model" }), 1000).share, undefined);
});

test("the speed is shown while text arrives", () => {
  assert.equal(describeRun(run({ phase: "writing", tokensPerSecond: 45.2 }), 0).text, "Generating · 45 tokens/s");
  assert.equal(describeRun(run({ phase: "thinking" }), 0).text, "Thinking");
});

test("a screen reader is not told each token of the prompt", () => {
  const at = (done: number) => announce(run({ phase: "prompt", progress: { done, total: 9, cached: 0 } }));
  assert.equal(at(1), at(2));
  assert.equal(announce(undefined), "");
});
