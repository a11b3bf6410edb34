import assert from "node:assert/strict";
import { test } from "node:test";
import { type Block, allot } from "./cells";

function tally(blocks: Block[]): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const block of blocks) counts[block] = (counts[block] ?? 0) + 1;
  return counts;
}

test("an empty cache is free", () => {
  assert.deepEqual(tally(allot(100, 0, 4096, [])), { free: 100 });
});

test("what no slot holds is kept for later", () => {
  const blocks = allot(100, 2048, 4096, [{ slot: 0, tokens: 1024 }]);
  assert.deepEqual(tally(blocks), { 0: 25, kept: 25, free: 50 });
  assert.deepEqual([blocks[0], blocks[24], blocks[25], blocks[99]], [0, 0, "kept", "free"]);
});

test("few tokens still show", () => {
  const blocks = allot(100, 3, 1_000_000, [{ slot: 0, tokens: 1 }, { slot: 3, tokens: 1 }]);
  assert.deepEqual(tally(blocks), { 0: 1, 3: 1, kept: 1, free: 97 });
});

test("slots that share tokens do not fill more than is used", () => {
  const shares = [0, 1, 2, 3].map((slot) => ({ slot, tokens: 1000 }));
  assert.deepEqual(tally(allot(100, 2000, 4000, shares)), { 0: 13, 1: 12, 2: 13, 3: 12, free: 50 });
});

test("there are never more blocks than asked for", () => {
  const shares = Array.from({ length: 64 }, (_, slot) => ({ slot, tokens: 1 }));
  assert.equal(allot(32, 64, 64, shares).length, 32);
  assert.deepEqual(tally(allot(10, 100, 100, [{ slot: 1, tokens: 100 }])), { 1: 10 });
});
