import assert from "node:assert/strict";
import { test } from "node:test";
import { MAX_BYTES, decode, readAttachment } from "./attachments";

const bytes = (...values: number[]) => new Uint8Array(values);

test("a text file becomes an attachment", async () => {
  const file = new File(["naïve\n"], "note.md", { type: "text/markdown" });
  assert.deepEqual(await readAttachment(file, "1"), {
    id: "1", name: "note.md", type: "text/markdown", size: 7, text: "naïve\n",
  });
  assert.equal((await readAttachment(new File(["x"], "Makefile"), "2")).type, "text/plain");
});

test("a file that is no text, or too large, is refused with its name", async () => {
  const picture = new File([bytes(0x89, 0x50, 0x4e, 0x47, 0, 1)], "photo.png");
  await assert.rejects(readAttachment(picture, "1"), /photo\.png.” is not a text file/);
  const large = new File([new Uint8Array(MAX_BYTES + 1).fill(65)], "log.txt");
  await assert.rejects(readAttachment(large, "1"), /log\.txt.” is too large/);
});

test("texts in other encodings are read", () => {
  assert.equal(decode(bytes()), "");
  assert.equal(decode(bytes(0xef, 0xbb, 0xbf, 0x61)), "a");
  assert.equal(decode(bytes(0xff, 0xfe, 0x61, 0)), "a");
  assert.equal(decode(bytes(0xfe, 0xff, 0, 0x61)), "a");
  assert.equal(decode(bytes(0x6e, 0x61, 0xef, 0x76, 0x65)), "naïve");
  assert.equal(decode(bytes(0xef, 0x01, 0x02)), null);
  assert.equal(decode(bytes(0x61, 0, 0x62)), null);
});
