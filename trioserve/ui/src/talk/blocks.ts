// The blocks of a text that grows: those that are complete stay the same objects, and are not read again.

import { lex, type Token, type Tokens } from "./lexer";
import type { MathsToken } from "./mathsSyntax";
import { closeLast } from "./unclosed";

export interface Block {
  /** The same for as long as the block is shown. */
  key: number;
  token: Token;
}

/**
 * Reads a text again and again while it grows.
 *
 * Text that comes later can change the last block only, and of a list its last item; so reading continues at its
 * beginning. A list that is written is one block: its complete items are kept, those after them are read again.
 */
export class Blocks {
  private text = "";
  private writing = true;
  private done: Block[] = [];
  /** The start of the last block, or of the last item of a list. */
  private at = 0;
  /** Of the list that is being written: what is complete. */
  private list: Tokens.List | null = null;
  private blocks: Block[] = [];

  /** The blocks of `text`; it usually begins with the text of the last call. */
  update(text: string, writing: boolean): Block[] {
    const normal = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    if (normal === this.text && writing === this.writing && this.blocks.length > 0) {
      return this.blocks;
    }
    // Once it is complete, a text is read as a whole: what its end says may matter to its beginning, as the definition
    // of a link does. What is the same then stays as it is on the page.
    const isComplete = !writing && this.writing;
    if (isComplete || !normal.startsWith(this.text)) this.restart();
    this.text = normal;
    this.writing = writing;
    this.blocks = this.read();
    return this.blocks;
  }

  private restart(): void {
    this.done = [];
    this.at = 0;
    this.list = null;
  }

  private read(): Block[] {
    const carried = this.list;
    const tokens = lex(this.text.slice(this.at), this.writing);
    if (carried && tokens[0]?.type === "list") tokens[0] = joined(carried, tokens[0] as Tokens.List);
    else if (carried) tokens.unshift(carried);

    // Definitions change what other blocks are, but not their text: such blocks are new ones. They do not change code,
    // and a page that runs in its preview would begin again.
    const isDefined = !this.writing && tokens.some(({ type }) => type === "def" || type === "footnote");
    const keyed = (token: Token, index: number): Block => ({ key: isDefined && token.type !== "code" ? index + 0.5 : index, token });
    const settled = settledUpTo(tokens);
    this.list = null;
    this.at -= carried?.raw.length ?? 0;
    for (const token of tokens.slice(0, settled)) {
      this.at += token.raw.length;
      if (token.type !== "space") this.done.push(keyed(token, this.done.length));
    }
    const rest = tokens.slice(settled).filter((token) => token.type !== "space");
    if (this.writing) closeLast(rest);
    const blocks = rest.map((token, index) => keyed(token, this.done.length + index));
    if (rest[0]?.type === "list") this.keepItems(rest[0] as Tokens.List, rest.length === 1);
    return [...this.done, ...blocks];
  }

  /** Of a list that may continue, keep the complete items, and continue at the first incomplete one. */
  private keepItems(list: Tokens.List, isLast: boolean): void {
    const open = isLast && isOneLine(list.items.at(-1)) ? 2 : 1;
    const items = list.items.slice(0, -open);
    const raw = items.map((item) => item.raw).join("");
    if (items.length === 0 || !this.text.startsWith(raw, this.at)) return;
    this.at += raw.length;
    this.list = { ...list, raw, items };
  }
}

/** The index of the first token that more text can change. */
function settledUpTo(tokens: Token[]): number {
  const last = tokens.findLastIndex((token) => token.type !== "space");
  if (last < tokens.length - 1 || !isUndecided(tokens[last])) return Math.max(0, last);
  // The rest of its line decides what it is. It may yet belong to the block before: as a paragraph that
  // continues, or as a further item of a list.
  const before = tokens.findLastIndex((token, index) => index < last && token.type !== "space");
  return Math.max(0, before);
}

function isUndecided(token: Token | undefined): boolean {
  if (token?.type === "mathsBlock") return (token as MathsToken).open || !token.raw.endsWith("\n");
  if (token?.type === "table") return (token as Tokens.Table).rows.length === 0;
  return isOneLine(token);
}

function isOneLine(token: Token | undefined): boolean {
  return token !== undefined && !token.raw.includes("\n");
}

function joined(list: Tokens.List, more: Tokens.List): Tokens.List {
  return {
    ...list,
    raw: list.raw + more.raw,
    loose: list.loose || more.loose,
    items: [...list.items, ...more.items],
  };
}

/** True if two tokens of a kind were read from the same text, and so are shown the same. */
export function same(one: Token, other: Token): boolean {
  return one === other || (one.type === other.type && one.raw === other.raw);
}
