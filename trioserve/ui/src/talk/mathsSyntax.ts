// The marks of maths in Markdown: $…$, $$…$$, \(…\) and \[…\].

import type { Token, TokenizerAndRendererExtension, Tokens } from "marked";

export interface MathsToken extends Tokens.Generic {
  type: "maths" | "mathsBlock";
  text: string;
  /** Set on separate lines. */
  display: boolean;
  /** Not closed yet. */
  open: boolean;
}

/** A longer formula is shown as it was written. */
const MAX = 4000;
const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/;
const OPEN_BLOCK = /^ {0,3}(?:\$\$|\\\[)[^$]*$/;
const DISPLAY = /^(?:\$\$((?:[^$\\]|\\[\s\S])+?)\$\$|\\\[([\s\S]+?)\\\])/;
// No space inside the dollars, and no letter or digit outside: "$5 and $10" and "$HOME:$PATH" are plain text.
const INLINE = /^\$(?![\s$])((?:[^$\\\n]|\\[^\n])*?(?:[^\s$\\]|\\[^\s\n]))\$(?![$\w])/;
const PARENTHESES = /^\\\(([\s\S]+?)\\\)/;
const BLANK_LINE = /\n[ \t]*\n/;
/** "\[1\]" is an escaped bracket. */
const FORMULA = /[\\^_=+<>{]/;

function found(
  type: MathsToken["type"],
  match: RegExpExecArray | null,
  display: boolean,
): MathsToken | undefined {
  const text = (match?.[1] ?? match?.[2])?.trim();
  if (!match || !text || (match[2] !== undefined && !FORMULA.test(text))) return undefined;
  return { type, raw: match[0], text, display, open: false };
}

/** The text up to the next blank line, which no formula goes beyond. */
function paragraph(src: string): string {
  const end = src.search(BLANK_LINE);
  return end < 0 ? src : src.slice(0, end + 1);
}

const block: TokenizerAndRendererExtension = {
  name: "mathsBlock",
  level: "block",
  start(src) {
    const at = paragraph(src).search(/\n {0,3}(?:\$\$|\\\[)/);
    return at < 0 ? undefined : at + 1;
  },
  tokenizer(src): MathsToken | undefined {
    if (!/^ {0,3}[$\\]/.test(src)) return undefined;
    const near = paragraph(src.slice(0, MAX));
    const token = found("mathsBlock", BLOCK.exec(near), true);
    const growing = (this.lexer as { growing?: boolean }).growing && near.length === src.length;
    if (token || !growing || !OPEN_BLOCK.test(near)) return token;
    return { type: "mathsBlock", raw: near, text: near, display: true, open: true };
  },
};

const inline: TokenizerAndRendererExtension = {
  name: "maths",
  level: "inline",
  start(src) {
    const at = src.search(/\$|\\[([]/);
    return at < 0 ? undefined : at;
  },
  tokenizer(src, tokens: Token[]): MathsToken | undefined {
    if (src[0] !== "$" && src[0] !== "\\") return undefined;
    const near = src.slice(0, MAX);
    const display = found("maths", DISPLAY.exec(near), true);
    if (display) return display;
    if (src[0] === "\\") return found("maths", PARENTHESES.exec(near), false);
    if (/\w$/.test(tokens.at(-1)?.raw ?? "")) return undefined;
    return found("maths", INLINE.exec(near), false);
  },
};

export const maths = [block, inline];
