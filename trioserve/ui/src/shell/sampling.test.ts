import assert from "node:assert/strict";
import { test } from "node:test";
import { type Field, groups, read, show, summary } from "./sampling";
import { withValue } from "../state/settings";

const fields = new Map(groups.flatMap((group) => group.fields).map((one) => [one.name, one]));
const field = (name: string): Field => {
  const found = fields.get(name);
  assert.ok(found);
  return found;
};

test("each setting is there once", () => {
  assert.equal(fields.size, groups.reduce((sum, group) => sum + group.fields.length, 0));
});

test("nothing is the default, and a decimal comma is a point", () => {
  assert.equal(read(field("temperature"), "  "), "default");
  assert.deepEqual(read(field("temperature"), "0,7"), { value: 0.7 });
  assert.deepEqual(read(field("temperature"), "0"), { value: 0 });
  assert.deepEqual(read(field("presence_penalty"), "-1.5"), { value: -1.5 });
});

test("what the server would refuse is marked at once", () => {
  assert.deepEqual(read(field("temperature"), "warm"), { problem: "This is not a number." });
  assert.deepEqual(read(field("temperature"), "Infinity"), { problem: "This is not a number." });
  assert.deepEqual(read(field("top_k"), "1.5"), { problem: "This has to be a whole number." });
  assert.deepEqual(read(field("top_p"), "1.01"), { problem: "The most is 1." });
  assert.deepEqual(read(field("min_p"), "-0.1"), { problem: "The least is 0." });
});

test("the server's numbers are shown as they were meant", () => {
  assert.equal(show(field("top_p"), 0.949999988079071), "0.95");
  assert.equal(show(field("seed"), 4294967295), "-1");
  assert.equal(show(field("seed"), 4294967294), "4294967294");
  assert.equal(show(field("mirostat"), undefined), "");
});

test("a setting is changed and taken out without touching the others", () => {
  const before = { temperature: 0.5, seed: 1 };
  assert.deepEqual(withValue(before, "seed", 2), { temperature: 0.5, seed: 2 });
  assert.deepEqual(withValue(before, "seed", undefined), { temperature: 0.5 });
  assert.deepEqual(before, { temperature: 0.5, seed: 1 });
});

test("settings in a line", () => {
  assert.equal(summary({}), "");
  const some = { temperature: 0.2, stop: ["\n", "END"], reasoning_effort: "none" };
  assert.equal(summary(some), 'temperature 0.2, stop "\\n" "END", reasoning effort none');
});
