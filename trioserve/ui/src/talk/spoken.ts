// The words of an answer, for a voice: without marks, code and what cannot be said.

import { t } from "../words";
import { alertIn } from "./alerts";
import { Blocks } from "./blocks";
import { decode } from "./entities";
import type { Token, Tokens } from "./lexer";
import { address, withoutDirections } from "./links";

/** Characters that are spoken at once: about half a minute. */
const MOST = 500;

/** Takes the sentences of an answer while it grows, each of them once. */
export class Sentences {
  readonly #blocks = new Blocks();
  #block = 0;
  /** Within the block. */
  #sentence = 0;

  /** The next sentences of `text`, which begins with that of the last call; empty: no further one is complete. */
  next(text: string, writing: boolean): string {
    const blocks = this.#blocks.update(text, writing);
    let piece = "";
    for (; ; this.#block += 1, this.#sentence = 0) {
      const block = blocks[this.#block];
      if (!block) return piece;
      const isLast = this.#block === blocks.length - 1;
      const sentences = sentencesOf(block.token);
      const complete = isLast && writing ? completeOf(sentences) : sentences.length;
      for (; this.#sentence < complete; this.#sentence += 1) {
        const longer = `${piece} ${sentences[this.#sentence]}`.trim();
        if (piece && longer.length > MOST) return piece;
        piece = longer;
      }
      if (isLast) return piece;
    }
  }
}

/** Of the sentences of a block that grows: the number of those that stay. A link or picture may yet be closed. */
function completeOf(sentences: string[]): number {
  const open = sentences.findIndex((one) => /\[[^\]]*$/.test(one));
  return open < 0 ? sentences.length - 1 : open;
}

const known = new WeakMap<Token, string[]>();

function sentencesOf(token: Token): string[] {
  let sentences = known.get(token);
  if (!sentences) known.set(token, (sentences = lines(token).flatMap(split)));
  return sentences;
}

const segmenter = new Intl.Segmenter(undefined, { granularity: "sentence" });

/** The sentences of a line; what is longer than a piece may be is cut between two words. */
function split(line: string): string[] {
  const said = sayable(line);
  if (!SOUND.test(said)) return [];
  const ended = /[\p{L}\p{N})\]"'»”’]$/u.test(said) ? `${said}.` : said; // a voice pauses there
  const found: string[] = [];
  for (let at = 0; at < ended.length; ) {
    const isLast = at + PART >= ended.length;
    const space = isLast ? 0 : ended.lastIndexOf(" ", at + PART);
    const part = ended.slice(at, space > at ? space : at + PART);
    const segments = Array.from(segmenter.segment(part), ({ segment }) => segment);
    if (!isLast && segments.length > 1) segments.pop(); // it may continue
    at += segments.join("").length;
    found.push(...segments.flatMap((segment) => segment.trim().match(SHORT) ?? []));
  }
  return found;
}

/** Characters that are segmented at once: V8 copies all of them for each sentence. */
const PART = 4 * MOST;

const SHORT = new RegExp(String.raw`\S[^]{0,${MOST - 2}}\S(?!\S)|\S[^]{0,${MOST - 1}}`, "gu");

const UNSAYABLE = /\[\^[^\]\s]{1,40}\]|\p{Extended_Pictographic}\u200d?|[\u{1f1e6}-\u{1f1ff}\u{1f3fb}-\u{1f3ff}\u20e3\ufe0f]/gu;

const SOUND = /[\p{L}\p{N}]/u;

/** Without pictures and marks of footnotes, and with one space between words. */
function sayable(line: string): string {
  return withoutDirections(line).replace(UNSAYABLE, "").replace(/[\s\u00ad]+/g, " ").trim();
}

/** What is said of a block, a line for each pause. */
function lines(token: Token): string[] {
  switch (token.type) {
    case "heading":
    case "paragraph":
    case "text":
    case "footnote":
      return [words([token])];
    case "blockquote": {
      const alert = alertIn(token as Tokens.Blockquote);
      return alert ? [t(alert.title), ...alert.tokens.flatMap(lines)] : token.tokens!.flatMap(lines);
    }
    case "list":
      return (token as Tokens.List).items.flatMap(({ tokens }) => tokens.flatMap(lines));
    case "table": {
      const { header, rows } = token as Tokens.Table;
      return [header, ...rows].map((row) => row.map(({ tokens }) => words(tokens)).join(", "));
    }
    default:
      return []; // code, formulas and lines
  }
}

function words(tokens: Token[]): string {
  return tokens.map(word).join("");
}

function word(token: Token): string {
  const { type, text = "" } = token as Tokens.Generic;
  if (type === "link" && /^(?:https?:|www\.)/.test(text)) return address((token as Tokens.Link).href)?.place ?? text;
  if ("tokens" in token && token.tokens) return words(token.tokens);
  if (type === "maths") return text.replace(/[\\{}^_&]+/g, " ");
  if (type === "text") return decode(text);
  if (type === "br" || /^<br/i.test(token.raw)) return " ";
  return ["codespan", "escape", "image"].includes(type) ? text : "";
}
