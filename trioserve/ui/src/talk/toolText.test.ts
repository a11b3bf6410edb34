import assert from "node:assert/strict";
import { test } from "node:test";

import { errorIn, gist, partOf, readDiff, screenText, unshown } from "./toolText";

test("codes of terminals are left out, and a line that was overwritten has its last text", () => {
  const cases: [string, string][] = [
    ["\u001b[1;31mred\u001b[0m text", "red text"],
    ["\u001b]0;a title\u0007shown", "shown"],
    ["\u001b]8;;https://x.example\u001b\\link\u001b]8;;\u001b\\", "link"],
    ["10%\r50%\r100%\ndone\r\n", "100%\ndone\n"],
    ["a\u0000b\u0007\u009bc\td", "abc\td"],
    ["\u001b[2J\u001b[H\u001b(Bx\u001bPq#0\u001b\\y", "xy"],
    ["\u001b]never closed", ""],
    ["\u001b", ""],
  ];
  for (const [written, shown] of cases) assert.equal(screenText(written), shown);
});

test("a text is cut at its lines and at its characters, at either end", () => {
  const text = Array.from({ length: 10 }, (_, i) => `line ${i}`).join("\n");
  assert.deepEqual(partOf(text, { lines: 2, characters: 99 }), { text: "line 0\nline 1", lines: 2, all: 10 });
  assert.deepEqual(partOf(text, { lines: 2, characters: 99 }, "end"), { text: "line 8\nline 9", lines: 2, all: 10 });
  assert.deepEqual(partOf(text, { lines: 9, characters: 8 }), { text: "line 0\nl", lines: 2, all: 10 });
  assert.equal(partOf(text, { lines: 10, characters: 99 }).text, text);
});

test("a unified diff has numbered lines, and what only looks like a header in it is a line", () => {
  const diff = "--- a/x\n+++ b/x\n@@ -3,3 +3,4 @@ def f():\n same\n--- old\n+++ new\n+more\n end\n\\ No newline at end of file\n";
  const { lines, added, removed } = readDiff(diff);
  assert.deepEqual([added, removed], [2, 1]);
  assert.deepEqual(lines, [
    { kind: "place", text: "@@ -3,3 +3,4 @@ def f():" },
    { kind: "same", text: "same", number: 3 },
    { kind: "removed", text: "-- old", number: 4 },
    { kind: "added", text: "++ new", number: 4 },
    { kind: "added", text: "more", number: 5 },
    { kind: "same", text: "end", number: 6 },
  ]);
  assert.deepEqual(readDiff("").lines, []);
  assert.deepEqual(readDiff("no diff\n+at all").lines, []);
});

test("what would hide what a diff does is shown", () => {
  const { lines } = readDiff(`@@ -1 +1 @@\n+\u001b[8mhidden\u202e${"x".repeat(5000)}`);
  assert.match(lines[1]!.text, /^⟨U\+001B⟩\[8mhidden⟨U\+202E⟩x{5000}$/);
});

test("what the server leaves out of a diff is named, and lines after that have their numbers", () => {
  const diff = "@@ -0,0 +1,9 @@\n+one\n[7 lines with 70 characters are not shown]\n@@ -0 +9 @@\n+nine\n";
  const read = readDiff(diff);
  assert.deepEqual(read.lines.slice(2), [
    { kind: "left", text: "[7 lines with 70 characters are not shown]" },
    { kind: "place", text: "@@ -0 +9 @@" },
    { kind: "added", text: "nine", number: 9 },
  ]);
  assert.equal(unshown(read, true), "a part of the change");
  assert.equal(unshown(readDiff("@@ -1 +1 @@\n-[7\n+[8"), false), "");
});

test("a diff of many lines, and a text of many codes, are read at once", () => {
  const began = performance.now();
  assert.equal(readDiff(`@@ -0,0 +1,100000 @@\n${"+line\n".repeat(100_000)}`).added, 100_000);
  screenText("\u001b[".repeat(500_000));
  screenText("\u001b]".repeat(500_000));
  screenText("\u001bP".repeat(500_000));
  screenText("\r".repeat(1_000_000));
  assert.ok(performance.now() - began < 3_000, "it takes long");
});

test("a call is known by its command, its pattern or its path", () => {
  assert.equal(gist('{"path": ".", "pattern": "def .*"}'), "def .*");
  assert.equal(gist('{"timeout": 3, "command": "ls\\n -l"}'), "ls -l");
  assert.equal(gist('{"command": "rm -rf /\\rls"}'), "rm -rf / ls");
  assert.equal(gist('{"city": "Paris"}'), "Paris");
  assert.equal(gist('{"deep": {"a": 1}}'), "");
  assert.equal(gist("[1]") + gist("null") + gist("{"), "");
  assert.equal(gist(JSON.stringify({ path: "x".repeat(999) })).length, 120);
});

test("an error that is the whole of a result is shown as one", () => {
  assert.equal(errorIn('{"error": "gone"}'), "gone");
  for (const other of ["gone", "{}", "null", '{"error": 1}', '{"error": "x", "more": 1}']) assert.equal(errorIn(other), null);
});
