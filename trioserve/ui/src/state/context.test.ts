import assert from "node:assert/strict";
import { test } from "node:test";

import "../testing/browser";
import { chatFor, messageFor } from "../testing/messages";
import type { Message } from "../types";
import { cutOf, sentOf, systemWith } from "./context";
import { canTitle, titleIn } from "./titles";

/** A path of questions and answers with so much text each. */
const pathOf = (...sizes: number[]): Message[] =>
  sizes.map((size, index) => messageFor({ id: `${index}`, role: index % 2 ? "assistant" : "user", content: "x".repeat(size) }));

test("the oldest turns go until half of the text is left, but not the last question", () => {
  assert.equal(cutOf(pathOf(10, 10, 10, 10, 10)), 4);
  assert.equal(cutOf(pathOf(10, 10, 10, 10, 10, 10, 10, 10)), 4);
  assert.equal(cutOf(pathOf(100, 1, 1, 1)), 2);
  assert.equal(cutOf(pathOf(1, 1, 100)), 2);
  assert.equal(cutOf(pathOf(1, 1, 1, 100)), 2);
});

test("one question alone cannot be cut", () => {
  assert.equal(cutOf(pathOf(100)), 0);
  assert.equal(cutOf(pathOf(100, 100)), 0);
  assert.equal(cutOf([]), 0);
});

test("what the model gets begins where the chat says, on the branches that have it", () => {
  const path = pathOf(1, 1, 1);
  const start = { message: "2", summary: "Before.", since: 1 };
  assert.deepEqual(sentOf(chatFor({}), path), { path, summary: "" });
  assert.deepEqual(sentOf(chatFor({ start }), path), { path: path.slice(2), summary: "Before." });
  assert.deepEqual(sentOf(chatFor({ start }), path.slice(0, 2)), { path: path.slice(0, 2), summary: "" });
});

test("a summary follows the system prompt", () => {
  assert.equal(systemWith("Be brief.", ""), "Be brief.");
  assert.match(systemWith("Be brief.", "Fruit."), /^Be brief\.\n\nSummary .*:\nFruit\.$/);
  assert.match(systemWith("", "Fruit."), /^Summary/);
});

test("a title is the first line of what the model wrote, without marks around it", () => {
  const cases: [string, string][] = [
    ['"Fruit and **vegetables**"', "Fruit and **vegetables"],
    ["# Title: Fruit.\n\nMore of it.", "Fruit"],
    ["<think>Let me see.</think>\nFruit", "Fruit"],
    ["<think>Let me", ""],
    ["标题：水果", "水果"],
    ["", ""],
    ["a".repeat(100), `${"a".repeat(80)}…`],
  ];
  for (const [written, title] of cases) assert.equal(titleIn(written), title);
});

test("a toy and a model without a template write no titles", () => {
  assert.deepEqual([{ toy: false }, { toy: false, hasTemplate: true }].map(canTitle), [true, true]);
  assert.deepEqual([{ toy: true }, { toy: false, hasTemplate: false }].map(canTitle), [false, false]);
});
