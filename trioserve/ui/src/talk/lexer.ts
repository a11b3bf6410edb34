// Markdown to tokens: marked's lexer with maths, without HTML, and with a bound on its work.
//
// A model's text is untrusted, and may be made to be slow to read: some texts take the lexer time that grows with
// the square of their length. A part that would be too much work stays as it was written.

import { Lexer, Marked, type Token, type Tokens, type TokensList } from "marked";

import { footnotes, labelsIn } from "./footnotes";
import { maths } from "./mathsSyntax";

export type { Token, Tokens };

/** Blocks within blocks, and emphasis within emphasis: below this, the text is taken as it is. */
const MAX_DEPTH = 12;
/** Characters that may begin or end something, in one paragraph. */
const MAX_MARKS = 1000;
/** Characters without a space between them. */
const MAX_WORD = 1000;
const MARK = /[\\<![\]`*_~@$]|https?:|www\./g;
/** The tags that mean something; they have no attributes. All others are text. */
const TAG = /^<(?:br ?\/?|\/?(?:b|em|i|kbd|mark|s|strong|sub|sup|u))>/i;

const marked = new Marked({
  gfm: true,
  extensions: [...maths, ...footnotes],
  tokenizer: {
    html: () => undefined,
    // A line of "-" under a paragraph is more often the beginning of a list.
    lheading: () => undefined,
    tag(src) {
      const raw = TAG.exec(src)?.[0];
      return raw === undefined
        ? undefined
        : { type: "html", raw, text: raw, block: false, inLink: false, inRawBlock: false };
    },
  },
});

/** A lexer that takes the rest as it is once it has done too much. */
class BoundedLexer extends Lexer {
  private depth = 0;
  private work = 0;
  private readonly limit: number;
  /** Those of its footnotes. */
  readonly labels: ReadonlySet<string>;

  /** `writing`: the text may continue, so that what is open at its end may be closed yet. */
  constructor(text: string, private readonly writing: boolean) {
    super(marked.defaults);
    this.limit = 3_000_000 + 16 * text.length;
    this.labels = labelsIn(text);
  }

  /** True if the block being read may continue beyond its end: not within another block. */
  get growing(): boolean {
    return this.writing && this.depth === 1;
  }

  override blockTokens(src: string, tokens: Token[] = [], clipped?: boolean): TokensList {
    this.work += src.length;
    if (this.tooMuch()) return plain(src, tokens) as TokensList;
    this.depth += 1;
    try {
      return super.blockTokens(src, tokens, clipped) as TokensList;
    } finally {
      this.depth -= 1;
    }
  }

  override inlineTokens(src: string, tokens: Token[] = []): Token[] {
    const marks = src.match(MARK)?.length ?? 0;
    this.work += src.length + marks * marks;
    if (marks > MAX_MARKS || this.tooMuch() || hasLongWord(src)) return plain(src, tokens);
    this.depth += 1;
    try {
      return super.inlineTokens(src, tokens);
    } finally {
      this.depth -= 1;
    }
  }

  private tooMuch(): boolean {
    return this.depth > MAX_DEPTH || this.work > this.limit;
  }
}

function hasLongWord(text: string): boolean {
  let begin = 0;
  while (text.length - begin > MAX_WORD) {
    const length = text.slice(begin, begin + MAX_WORD + 1).search(/\s(?=\S*$)/);
    if (length < 0) return true;
    begin += length + 1;
  }
  return false;
}

function plain(src: string, tokens: Token[]): Token[] {
  tokens.push({ type: "text", raw: src, text: src, escaped: true });
  return tokens;
}

/** The blocks of a text. */
export function lex(text: string, writing = false): Token[] {
  return new BoundedLexer(text, writing).lex(text);
}
