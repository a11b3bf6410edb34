// Unclosed marks at the end of a text that is being written: bold text and code are shown as such at once, and not with
// the marks that begin them until the marks that end them have come.

import type { Token, Tokens } from "./lexer";

/** Marks that begin something, in a text in which nothing ends it. */
const BEGUN = /^([\s\S]*?)(\*\*|`)((?!\s)[\s\S]*)$/;

/** Marks whose meaning depends on the text that follows. */
const MARKS = /(?:`+|\*+)$/;

/** Take what is begun in the last of some blocks as what it will be. */
export function closeLast(blocks: Token[]): void {
  const last = blocks.findLast((token) => token.type !== "space");
  switch (last?.type) {
    case "list":
      closeLast((last as Tokens.List).items.at(-1)?.tokens ?? []);
      break;
    case "blockquote":
      closeLast((last as Tokens.Blockquote).tokens);
      break;
    case "paragraph":
    case "heading":
    case "text":
      closeSpan(last.tokens ?? []);
      break;
  }
}

function closeSpan(tokens: Token[]): void {
  const last = tokens.at(-1);
  if (last?.type !== "text" || last.tokens) return;
  tokens.pop();
  const text = { ...last, text: (last as Tokens.Text).text.replace(MARKS, "") } as Tokens.Text;
  const [, before = "", mark, inner] = BEGUN.exec(text.text) ?? [];
  if (!mark || !inner || inner.includes(mark)) {
    tokens.push(text);
    return;
  }
  if (before) tokens.push({ ...text, raw: before, text: before });
  const raw = mark + inner;
  if (mark === "`") tokens.push({ type: "codespan", raw, text: inner });
  else tokens.push({ type: "strong", raw, text: inner, tokens: [{ ...text, raw: inner, text: inner }] });
}
