import assert from "node:assert/strict";
import { test } from "node:test";
import { fileName } from "./files";

const day = new Date(2026, 0, 9);

test("a file of chats has the title and the day in its name, and nothing that paths are made of", () => {
  assert.equal(fileName(null, day), "chats-2026-01-09.json");
  assert.equal(fileName("How do I sort a list?", day), "how-do-i-sort-a-list-2026-01-09.json");
  assert.equal(fileName("../../etc/passwd", day), "etc-passwd-2026-01-09.json");
  assert.equal(fileName("…", day), "chat-2026-01-09.json");
  assert.ok(fileName("x".repeat(300), day).length < 80);
});
