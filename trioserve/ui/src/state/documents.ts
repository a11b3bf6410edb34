// Documents that are longer than the model's context: of each, the question gets the parts that are nearest to it.

import type { Attachment, Message, Part } from "../types";
import { embed, likeness } from "./embeddings";
import { roomFor } from "./lengths";

/** Characters of a part, and by how many two of them overlap. */
const PART = 1_200;
const OVERLAP = 150;

/** Embeddings of parts, by their texts: a document is embedded once. */
const known = new Map<string, Float32Array>();
const MOST_KNOWN = 5_000;

/** The documents of a chat that were sent in parts. */
export function documentsIn(path: readonly Message[]): Attachment[] {
  const used = new Set(path.flatMap(({ parts = [] }) => parts.map(({ file }) => file)));
  return path.flatMap(({ attachments }) => attachments).filter(({ id }) => used.has(id));
}

/** Find the parts of documents that are nearest to a question, until the context has no more room. */
export async function partsFor(
  question: string,
  documents: readonly Attachment[],
  contextSize: number,
  model: string,
): Promise<Part[]> {
  const parts = documents.flatMap(partsOf);
  const texts = parts.map((part) => textIn(part, documents));
  const missing = [...new Set(texts)].filter((text) => !known.has(text));
  const [asked, ...found] = await embed([question.slice(0, PART) || documents.map(({ name }) => name).join(" "), ...missing], model);
  if (known.size + missing.length > MOST_KNOWN) known.clear();
  const vectors = new Map(missing.map((text, index) => [text, found[index]!]));
  const vectorOf = (text: string) => known.get(text) ?? vectors.get(text)!;
  const byNearness = parts
    .map((part, index) => ({ part, near: likeness(asked!, vectorOf(texts[index]!)) }))
    .sort((a, b) => b.near - a.near);
  for (const [text, vector] of vectors) known.set(text, vector);
  const count = Math.max(1, Math.floor(roomFor(contextSize) / PART));
  return byNearness.slice(0, count).map(({ part }) => part).sort(inOrder(documents));
}

/** Cut a document into parts, each ending with a paragraph or a line where one ends there. */
export function partsOf({ id, text }: Attachment): Part[] {
  const parts: Part[] = [];
  for (let from = 0; from < text.length; ) {
    const most = Math.min(from + PART, text.length);
    const cut = most === text.length ? most : endOf(text, from + PART / 2, most);
    parts.push({ file: id, from, to: cut });
    if (cut === text.length) break;
    from = Math.max(cut - OVERLAP, from + 1);
  }
  return parts;
}

function endOf(text: string, least: number, most: number): number {
  const piece = text.slice(0, most);
  for (const end of ["\n\n", "\n", ". ", " "]) {
    const at = piece.lastIndexOf(end);
    if (at >= least) return at + end.length;
  }
  return most;
}

/** The text of a part. */
export function textIn({ file, from, to }: Part, documents: readonly Attachment[]): string {
  return documents.find(({ id }) => id === file)?.text.slice(from, to) ?? "";
}

function inOrder(documents: readonly Attachment[]): (a: Part, b: Part) => number {
  const at = ({ file }: Part) => documents.findIndex(({ id }) => id === file);
  return (a, b) => at(a) - at(b) || a.from - b.from;
}
