import assert from "node:assert/strict";
import { test } from "node:test";
import { area, line } from "./spark";

test("the newest value is at the right, and the highest at the top", () => {
  assert.equal(line([0, 10, 5], 3, 100, 20), "M0 20L50 0L100 10");
  assert.equal(line([4], 61, 120, 20), "M120 0");
  assert.equal(line([2, 4], 61, 120, 20), "M118 10L120 0");
});

test("silence is a line at the bottom", () => {
  assert.equal(line([0, 0], 2, 100, 20), "M0 20L100 20");
});

test("the area is closed along the bottom", () => {
  assert.equal(area([0, 10], 3, 100, 20), "M50 20L100 0L100 20L50 20Z");
  assert.equal(area([], 3, 100, 20), "");
});
