import assert from "node:assert/strict";
import { test } from "node:test";

import type { Message, Stats } from "../types";
import { figures } from "./figures";
import { canContinue, problem } from "./problems";
import { pretty, readArguments, toolNames } from "./toolCalls";
import { beginning } from "./window";

const message: Message = {
  id: "m",
  chat: "c",
  parent: null,
  role: "assistant",
  content: "text",
  reasoning: "",
  toolCalls: [],
  attachments: [],
  model: "",
  createdAt: 0,
  state: "done",
};

const stats: Stats = {
  tokens: 312,
  tokensPerSecond: 42.3,
  ttft: 310,
  promptTokens: 1200,
  cachedTokens: 1000,
  contextUsed: 1512,
  contextSize: 4096,
};

test("an answer's figures are those that are known", () => {
  const texts = (one: Stats) => figures(one).map(({ text }) => text);
  assert.deepEqual(texts(stats), ["42 tokens/s", "310 ms to first token", "312 tokens", "37% of context"]);
  assert.deepEqual(texts({ ...stats, contextSize: 0 }).at(-1), "1,512 of context");
  assert.deepEqual(texts({ ...stats, ttft: 2345 })[1], "2.3 s to first token");
  const none = { tokens: 0, tokensPerSecond: 0, ttft: 0, promptTokens: 0, cachedTokens: 0, contextUsed: 0 };
  assert.deepEqual(texts({ ...none, contextSize: 0 }), []);
  assert.match(figures(stats)[2]?.title ?? "", /prompt: 1,200 tokens, 1,000 of them cached/);
});

test("an answer that is complete has no problem", () => {
  assert.equal(problem(message), null);
  assert.equal(problem({ ...message, state: "writing" }), null);
  assert.equal(problem({ ...message, finish: "stop" }), null);
});

test("what is wrong with an answer is said", () => {
  assert.deepEqual(problem({ ...message, state: "failed", error: "Gone." }), { text: "Gone.", failed: true });
  assert.equal(problem({ ...message, state: "failed" })?.failed, true);
  assert.equal(problem({ ...message, state: "stopped" })?.failed, false);
  assert.match(problem({ ...message, finish: "length" })?.text ?? "", /length/);
  assert.match(problem({ ...message, content: "" })?.text ?? "", /no answer/);
});

test("an answer can be continued where there is one, and no tool is waited for", () => {
  assert.ok(canContinue(message));
  assert.ok(!canContinue({ ...message, content: "" }));
  assert.ok(!canContinue({ ...message, toolCalls: [{ id: "1", name: "f", arguments: "{}" }] }));
});

test("the arguments of a call are read as soon as they are complete", () => {
  assert.deepEqual(readArguments('{"city": "Oslo", "days": 3, "at": {"x": 1}}'), {
    named: [["city", "Oslo"], ["days", "3"], ["at", '{\n  "x": 1\n}']],
  });
  assert.deepEqual(readArguments('{"city": "Os'), { raw: '{"city": "Os' });
  assert.deepEqual(readArguments("[1]"), { raw: "[1]" });
  assert.deepEqual(readArguments(""), { raw: "" });
});

test("a result that is JSON is put on lines", () => {
  assert.deepEqual(pretty('{"a":1}'), { text: '{\n  "a": 1\n}', json: true });
  assert.deepEqual(pretty("12 degrees"), { text: "12 degrees", json: false });
  assert.deepEqual(pretty("{not json"), { text: "{not json", json: false });
});

test("results belong to the calls before them, in order", () => {
  const call = (name: string) => ({ id: name, name, arguments: "{}" });
  const path: Message[] = [
    { ...message, id: "a", toolCalls: [call("one"), call("two")] },
    { ...message, id: "b", role: "tool" },
    { ...message, id: "c", role: "tool" },
    { ...message, id: "d", role: "tool" },
    { ...message, id: "e", toolCalls: [call("three")] },
    { ...message, id: "f", role: "tool" },
  ];
  assert.deepEqual([...toolNames(path)], [["b", "one"], ["c", "two"], ["d", ""], ["f", "three"]]);
});

test("of a long conversation the end is shown at first", () => {
  const path = Array.from({ length: 500 }, () => message);
  assert.equal(beginning(path, 500), 480);
  assert.equal(beginning(path, 480), 460);
  assert.equal(beginning(path, 10), 0);
  assert.equal(beginning([], 0), 0);
  const long = Array.from({ length: 500 }, () => ({ ...message, content: "x".repeat(50_000) }));
  assert.equal(beginning(long, 500), 496);
});
