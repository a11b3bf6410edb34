import "../testing/browser";

import assert from "node:assert/strict";
import { test } from "node:test";
import { MAX_MEDIA, MAX_TEXT, decode, readAttachment } from "./attachments";
import { fitted, MAX_PIXELS } from "./pictures";

const bytes = (...values: number[]) => new Uint8Array(values);

test("a text file becomes an attachment", async () => {
  const file = new File(["naïve\n"], "note.md", { type: "text/markdown" });
  assert.deepEqual(await readAttachment(file, "1"), {
    id: "1", name: "note.md", type: "text/markdown", size: 7, text: "naïve\n",
  });
  assert.equal((await readAttachment(new File(["x"], "Makefile"), "2")).type, "text/plain");
});

test("a file that is no text, or too large, is refused with its name", async () => {
  const archive = new File([bytes(0x89, 0x50, 0x4e, 0x47, 0, 1)], "some.zip", { type: "application/zip" });
  await assert.rejects(readAttachment(archive, "1"), /some\.zip.” is neither a text nor a PDF, a picture/);
  const large = new File([new Uint8Array(MAX_TEXT + 1).fill(65)], "log.txt");
  await assert.rejects(readAttachment(large, "1"), /log\.txt.” is too large. The limit is 1\.0 MB/);
  const long = new File([new Uint8Array(MAX_MEDIA + 1)], "opera.mp3", { type: "audio/mpeg" });
  await assert.rejects(readAttachment(long, "1"), /opera\.mp3.” is too large. The limit is 50 MB/);
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

test("a recording is attached as it is, and what only seems to be a video as text", async () => {
  const file = new File([bytes(0x1a, 0x45, 0xdf, 0xa3, 0)], "a.webm", { type: "audio/webm;codecs=opus" });
  const { data, ...rest } = await readAttachment(file, "1");
  assert.deepEqual(rest, { id: "1", name: "a.webm", type: "audio/webm", size: 5, text: "" });
  assert.deepEqual([data!.type, await data!.text()], ["audio/webm", await file.text()]);
  const program = new File(["const one = 1;"], "one.ts", { type: "video/mp2t" });
  assert.deepEqual([(await readAttachment(program, "2")).text, program.type], ["const one = 1;", "video/mp2t"]);
});

test("a PDF is known by its content, and is no text", async () => {
  const file = new File(["%PDF-1.4\n%%EOF\n"], "a.pdf");
  const { data, ...rest } = await readAttachment(file, "1");
  assert.deepEqual(rest, { id: "1", name: "a.pdf", type: "application/pdf", size: 15, text: "" });
  assert.equal(await data!.text(), await file.text());
});

test("a picture keeps its size, or is scaled to the maximum of pixels", () => {
  assert.deepEqual(fitted(1, 1), [1, 1]);
  assert.deepEqual(fitted(2048, 2048), [2048, 2048]);
  assert.deepEqual(fitted(4000, 3000), [2364, 1773]);
  const [long, thin] = fitted(100_000, 100);
  assert.ok(long * thin <= MAX_PIXELS && Math.abs(long / thin - 1000) < 20);
});
