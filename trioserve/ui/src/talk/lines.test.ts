import assert from "node:assert/strict";
import { test } from "node:test";

import { linesOf, same } from "./lines";

test("lines are coloured as far as the colours are there", () => {
  const coloured = { code: "let a;\n", lines: [[["keyword", "let"] as [string, string], ["", " a;"] as [string, string]], []] };
  assert.deepEqual(linesOf("let a;\nlet b;\n", coloured), [coloured.lines[0], [["", "let b;"]], []]);
  assert.equal(linesOf("let a;\nlet", coloured)[0], coloured.lines[0]);
  assert.deepEqual(linesOf("let a;\n", coloured), coloured.lines);
});

test("the rest of a line continues where its colours end", () => {
  const coloured = { code: "let", lines: [[["keyword", "let"] as [string, string]]] };
  assert.deepEqual(linesOf("let a\n\nb", coloured), [[["keyword", "let"], ["", " a"]], [], [["", "b"]]]);
});

test("without colours all is plain", () => {
  assert.deepEqual(linesOf("a\n\nb", { code: "", lines: [] }), [[["", "a"]], [], [["", "b"]]]);
  assert.deepEqual(linesOf("", { code: "", lines: [] }), [[]]);
});

test("lines are the same if they look the same", () => {
  assert.ok(same([["", "a"]], [["", "a"]]));
  assert.ok(!same([["", "a"]], [["keyword", "a"]]));
  assert.ok(!same([["", "a"]], [["", "a"], ["", "b"]]));
  assert.ok(!same([], undefined));
});
