import assert from "node:assert/strict";
import { test } from "node:test";

import { messageFor } from "../testing/messages";
import { Answer } from "./answer";

const stream = { conversation: "c.1", offset: 0, startedAt: 1_000 };
const empty = () =>
  new Answer({ ...messageFor({ role: "assistant", state: "writing", content: "" }), stream });

const chunk = (delta: object, more: object = {}) => ({ choices: [{ delta, finish_reason: null }], ...more });

test("text, reasoning and calls are put together, and belong to the offset", () => {
  const answer = empty();
  assert.equal(answer.take(chunk({ role: "assistant", content: null }), 10), false);
  assert.equal(answer.take(chunk({ reasoning_content: "hm" }), 20), true);
  assert.equal(answer.phase, "thinking");
  answer.take(chunk({ content: "Hel" }), 30);
  answer.take(chunk({ content: "lo" }), 40);
  assert.equal(answer.phase, "writing");
  answer.take(chunk({ tool_calls: [{ index: 0, id: "1", function: { name: "f", arguments: "" } }] }), 50);
  answer.take(chunk({ tool_calls: [{ index: 0, function: { arguments: '{"a":' } }] }), 60);
  answer.take(chunk({ tool_calls: [{ index: 0, function: { arguments: "1}" } }, { index: 1, id: "2", function: { name: "g", arguments: "{}" } }] }), 70);
  const message = answer.message(100);
  assert.deepEqual([message.content, message.reasoning, message.stream!.offset], ["Hello", "hm", 70]);
  assert.deepEqual(message.toolCalls, [
    { id: "1", name: "f", arguments: '{"a":1}' },
    { id: "2", name: "g", arguments: "{}" },
  ]);
});

test("an answer continues from its saved part", () => {
  const saved = messageFor({ role: "assistant", state: "writing", content: "Hel", reasoning: "hm" });
  const answer = new Answer({ ...saved, stream: { ...stream, offset: 30, ttft: 250 } });
  answer.take(chunk({ content: "lo" }), 40);
  const timings = { cache_n: 3, prompt_n: 4, predicted_n: 9, predicted_per_second: 12.5 };
  answer.take({ choices: [{ delta: {}, finish_reason: "stop" }], timings }, 50);
  const { content, stats, finish } = answer.message(4096);
  assert.deepEqual([content, finish], ["Hello", "stop"]);
  assert.deepEqual(stats, {
    tokens: 9, tokensPerSecond: 12.5, ttft: 250, promptTokens: 7, cachedTokens: 3, contextUsed: 16, contextSize: 4096,
  });
});

test("an answer that was stopped has the figures of its last event", () => {
  const answer = empty();
  const progress = { prompt_progress: { total: 10, cache: 4, processed: 10, time_ms: 1 } };
  const timings = { cache_n: 4, prompt_n: 6, predicted_n: 0, predicted_ms: 0, predicted_per_second: 0 };
  answer.take(chunk({}, { ...progress, timings }), 5, 1_100);
  assert.equal(answer.message(0).stats, undefined);
  const later = { ...timings, predicted_n: 2, predicted_ms: 100, predicted_per_second: 10 };
  answer.take(chunk({ content: "ab" }, { timings: later }), 20, 1_250);
  assert.deepEqual(answer.message(0).stats, {
    tokens: 2, tokensPerSecond: 10, ttft: 250, promptTokens: 10, cachedTokens: 4, contextUsed: 12, contextSize: 0,
  });
});

test("comments tell of the queue and of the model", () => {
  const answer = empty();
  answer.comment("queued, position 3, about 2.1 s");
  assert.deepEqual([answer.phase, answer.place], ["queued", { position: 3, waitS: 2.1 }]);
  answer.comment("queued, position 1");
  assert.deepEqual(answer.place, { position: 1 });
  answer.comment("waiting for the model, position 2");
  assert.deepEqual([answer.phase, answer.place], ["loading-model", { position: 2 }]);
  answer.comment("loading the model, 40%");
  assert.deepEqual([answer.place, answer.note], [undefined, "Loading the model, 40%"]);
  answer.comment("");
  assert.equal(answer.phase, "loading-model");
  answer.take(chunk({}, { prompt_progress: { total: 10, cache: 4, processed: 6, time_ms: 1 } }), 5);
  assert.deepEqual([answer.phase, answer.note, answer.progress], ["prompt", undefined, { done: 6, total: 10, cached: 4 }]);
  answer.take(chunk({ content: "a" }), 9);
  assert.deepEqual([answer.phase, answer.progress], ["writing", undefined]);
});

test("the speed is that of the last seconds by the server's clock", () => {
  const answer = empty();
  const at = (predicted_n: number, predicted_ms: number) =>
    answer.take(chunk({ content: "a" }, { timings: { predicted_n, predicted_ms } }), predicted_n, 5);
  assert.equal(answer.speed, undefined);
  at(1, 0);
  assert.equal(answer.speed, undefined);
  for (let i = 2; i <= 101; i++) at(i, (i - 1) * 50);
  assert.equal(answer.speed, 20);
  for (let i = 1; i <= 100; i++) at(101 + i * 3, 5_000 + i * 50);
  assert.equal(answer.speed, 60);
});

test("a fragment with a strange index becomes a separate call", () => {
  const answer = empty();
  answer.take(chunk({ tool_calls: [{ index: 4e9, id: "1", function: { name: "f" } }, 5] }), 1);
  assert.deepEqual(answer.message(0).toolCalls, [{ id: "1", name: "f", arguments: "" }]);
});
