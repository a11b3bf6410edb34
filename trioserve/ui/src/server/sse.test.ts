import assert from "node:assert/strict";
import { test } from "node:test";

import { randomFrom } from "../testing/browser";
import { SseParser, type SseItem } from "./sse";

const encode = (text: string) => new TextEncoder().encode(text);

function parse(bytes: Uint8Array, cuts: readonly number[], offset = 0): SseItem[] {
  const parser = new SseParser(offset);
  const edges = [0, ...cuts, bytes.length];
  return edges.slice(1).flatMap((edge, i) => parser.push(bytes.subarray(edges[i], edge)));
}

const STREAM = encode(
  ": queued, position 2, about 3.0 s\n\n" +
    'data: {"a":"häßlich 🙂"}\nid: 73\n\n' +
    ":\n\n" +
    "event: done\r\ndata: one\r\ndata:two\r\n\r\n" +
    "retry: 5\n\n" +
    "data: [DONE]\n\n",
);

test("events and comments do not depend on where the bytes are cut", () => {
  const whole = parse(STREAM, []);
  assert.deepEqual(
    whole.map((item) => (item.kind === "event" ? [item.name, item.data] : [item.text])),
    [
      ["queued, position 2, about 3.0 s"],
      ["message", '{"a":"häßlich 🙂"}'],
      [""],
      ["done", "one\ntwo"],
      ["message", "[DONE]"],
    ],
  );
  for (let cut = 0; cut <= STREAM.length; cut++) assert.deepEqual(parse(STREAM, [cut]), whole);
  const everywhere = Array.from({ length: STREAM.length - 1 }, (_, i) => i + 1);
  assert.deepEqual(parse(STREAM, everywhere), whole);
});

test("the offset of an event is where its bytes end", () => {
  const random = randomFrom(7);
  const texts = Array.from({ length: 200 }, () => "é🙂x\\n".repeat(random() * 9));
  const events = texts.map((text) => encode(`data: ${text}\n\n`));
  const ends = events.map((_, i) => events.slice(0, i + 1).reduce((sum, one) => sum + one.length, 100));
  const bytes = Uint8Array.from(events.flatMap((event) => [...event]));
  const items = parse(bytes, [11, 12, 300], 100);
  assert.deepEqual(items.map((item) => item.kind === "event" && item.offset), ends);
});

test("an id wins over the count: a proxy may have added comments", () => {
  const items = parse(encode(": proxy\n\ndata: a\nid: 12\n\ndata: b\n\n"), [], 0);
  assert.deepEqual(items.slice(1).map((item) => item.kind === "event" && item.offset), [12, 21]);
});
