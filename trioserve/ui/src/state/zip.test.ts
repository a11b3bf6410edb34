import assert from "node:assert/strict";
import { test } from "node:test";
import { crc32, deflateRawSync } from "node:zlib";

import { isZip, textsIn } from "./zip";

/** Make a ZIP file, as any program does. */
function zip(texts: readonly string[], deflates = true, comment = ""): Uint8Array {
  const files: Buffer[] = [];
  const directory: Buffer[] = [];
  let offset = 0;
  texts.forEach((text, i) => {
    const name = Buffer.from(`${i}.jsonl`);
    const raw = Buffer.from(text);
    const data = deflates ? deflateRawSync(raw) : raw;
    const about = Buffer.alloc(26);
    about.writeUInt16LE(20, 0);
    about.writeUInt16LE(deflates ? 8 : 0, 4);
    about.writeUInt32LE(typeof crc32 === "function" ? crc32(raw) : 0, 10);
    about.writeUInt32LE(data.length, 14);
    about.writeUInt32LE(raw.length, 18);
    about.writeUInt16LE(name.length, 22);
    const more = Buffer.alloc(14);
    more.writeUInt32LE(offset, 10);
    files.push(Buffer.from("PK\x03\x04", "latin1"), about, name, data);
    directory.push(Buffer.from("PK\x01\x02\x14\x00", "latin1"), about, more, name);
    offset += 4 + about.length + name.length + data.length;
  });
  const end = Buffer.alloc(22);
  end.write("PK\x05\x06", "latin1");
  end.writeUInt16LE(texts.length, 8);
  end.writeUInt16LE(texts.length, 10);
  end.writeUInt32LE(Buffer.concat(directory).length, 12);
  end.writeUInt32LE(offset, 16);
  end.writeUInt16LE(comment.length, 20);
  return new Uint8Array(Buffer.concat([...files, ...directory, end, Buffer.from(comment)]));
}

test("texts come out as they went in", async () => {
  const texts = ["one", "zwei 🙂\n".repeat(1000), "{}"];
  for (const file of [zip(texts), zip(texts, false), zip(texts, true, "a comment")]) {
    assert.ok(isZip(file));
    assert.deepEqual(await textsIn(file), texts);
  }
  assert.equal(isZip(new TextEncoder().encode('{"format": 1}')), false);
  assert.equal(isZip(new Uint8Array(0)), false);
});

test("a damaged file is refused in words", async () => {
  const whole = zip(["one", "two".repeat(500)]);
  const wrong = whole.slice();
  wrong.fill(255, 40, 60);
  for (const file of [whole.slice(0, 60), whole.slice(0, 8), wrong]) {
    await assert.rejects(textsIn(file), /ZIP file is damaged/);
  }
});

test("a file that holds more than it may is refused", async () => {
  const file = zip(["one".repeat(1000), "two".repeat(1000)]);
  assert.equal((await textsIn(file, 6000)).length, 2);
  await assert.rejects(textsIn(file, 5999), /ZIP file is damaged/);
});
