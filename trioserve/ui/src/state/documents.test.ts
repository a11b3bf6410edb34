import assert from "node:assert/strict";
import { test } from "node:test";

import "../testing/browser";
import type { Attachment } from "../types";
import { documentsIn, partsFor, partsOf, textIn } from "./documents";
import { areTooLong } from "./lengths";

const file = (id: string, text: string): Attachment => ({ id, name: `${id}.txt`, type: "text/plain", size: text.length, text });
const sentence = (number: number) => `This is sentence ${number} of a long document. `;
const long = file("long", Array.from({ length: 400 }, (_, number) => sentence(number)).join(""));

test("parts cover a document, overlap, and end where a sentence does", () => {
  const parts = partsOf(long);
  assert.equal(parts[0]!.from, 0);
  assert.equal(parts.at(-1)!.to, long.text.length);
  for (const [index, part] of parts.entries()) {
    const next = parts[index + 1];
    if (!next) break;
    assert.ok(part.from < next.from && next.from < part.to, "a gap");
    assert.ok(textIn(part, [long]).endsWith(". "));
  }
  assert.deepEqual(partsOf(file("empty", "")), []);
  assert.equal(partsOf(file("x", "x".repeat(5_000))).at(-1)!.to, 5_000);
});

test("only files that exceed the share of the context are cut", () => {
  assert.equal(areTooLong([long], 0), false);
  assert.equal(areTooLong([long], 100_000), false);
  assert.equal(areTooLong([long], 4_096), true);
});

test("the nearest parts are chosen, in the order of the document", async () => {
  const asked: string[][] = [];
  const direction = (text: string) => (/sentence (7|399) /.test(text) ? [1, 0] : [0, 1]);
  globalThis.fetch = async (_, options) => {
    const { input } = JSON.parse(String(options?.body));
    asked.push(input);
    return Response.json({ data: input.map((text: string) => ({ embedding: direction(text) })) });
  };
  const parts = await partsFor("What of sentence 7 ?", [long], 2_048, "");
  assert.equal(parts.length, 2);
  assert.match(textIn(parts[0]!, [long]), /sentence 7 /);
  assert.match(textIn(parts[1]!, [long]), /sentence 399 /);
  assert.ok(asked.every((input) => input.length <= 64));
  const before = asked.flat().length;
  await partsFor("And sentence 399 ?", [long], 2_048, "");
  assert.equal(asked.flat().length, before + 1, "a document is embedded once");
  const path = [{ attachments: [long], parts }] as any;
  assert.deepEqual(documentsIn(path), [long]);
});
