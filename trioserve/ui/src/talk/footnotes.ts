// Footnotes in Markdown: [^1] in a text, and what it says in a block that begins with "[^1]: ".

import type { TokenizerAndRendererExtension, Tokens } from "marked";

export interface FootnoteToken extends Tokens.Generic {
  type: "footnote" | "footnoteMark";
  label: string;
}

const LABEL = String.raw`\[\^([^\]\s[^]{1,40})\]`;
const MARK = new RegExp(`^${LABEL}`);
const BEGIN = new RegExp(`^ {0,3}${LABEL}:`);
const BEGINS = new RegExp(`^ {0,3}${LABEL}:`, "gm");
const LINE_BEFORE = new RegExp(String.raw`\n {0,3}${LABEL}:`);

/** The labels that a text has footnotes for. Other marks are text, such as a part of a regular expression. */
export function labelsIn(text: string): Set<string> {
  return new Set(text.includes("[^") ? Array.from(text.matchAll(BEGINS), ([, label]) => label!) : []);
}

/** The text of a footnote: its line, and those that continue it. */
function extent(src: string): string {
  const lines = src.split("\n", 20);
  const end = lines.findIndex((line, at) => at > 0 && (line.trim() === "" || BEGIN.test(line)));
  return lines.slice(0, end < 0 ? lines.length : end).join("\n");
}

const block: TokenizerAndRendererExtension = {
  name: "footnote",
  level: "block",
  start(src) {
    const at = src.search(LINE_BEFORE);
    return at < 0 ? undefined : at + 1;
  },
  tokenizer(src): FootnoteToken | undefined {
    const [begun, label] = BEGIN.exec(src) ?? [];
    if (begun === undefined || label === undefined) return undefined;
    const text = extent(src);
    const raw = text + (/^\n+/.exec(src.slice(text.length))?.[0] ?? "");
    const tokens = this.lexer.inline(text.slice(begun.length).trim());
    return { type: "footnote", raw, label, tokens };
  },
};

const inline: TokenizerAndRendererExtension = {
  name: "footnoteMark",
  level: "inline",
  start(src) {
    const at = src.indexOf("[^");
    return at < 0 ? undefined : at;
  },
  tokenizer(src): FootnoteToken | undefined {
    const [raw, label] = MARK.exec(src) ?? [];
    const { labels } = this.lexer as { labels?: ReadonlySet<string> };
    return raw && label && labels?.has(label) ? { type: "footnoteMark", raw, label } : undefined;
  },
};

export const footnotes = [block, inline];
