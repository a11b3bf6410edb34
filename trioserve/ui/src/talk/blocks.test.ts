import assert from "node:assert/strict";
import { test } from "node:test";

import { Blocks, type Block } from "./blocks";
import { lex, type Token, type Tokens } from "./lexer";

const answer = `# A title

A paragraph with **bold**, \`code\`, $a_1 + b_1$ and a [link](https://example.org).
It continues.

1. One
   - nested
   - nested too

     with a paragraph
2. Two
3. Three

   \`\`\`python
   print("in a list")
   \`\`\`
4. Four

- other
* list

| a | b |
|---|--:|
| 1 | 2 |
| 3 | \`4\` |

$$
a = b

$$

$$
x - y
= z
$$

> quoted
> > twice
lazily

\`\`\`js
const a = 1;

const b = 2;
\`\`\`

    indented

    code
Text after it
***
- [ ] task
- [x] done
 
\\[ x^2 \\]

<div onclick="x">

The end[^1], see [there][1].`;

const links = `${answer}

[1]: https://example.org/there "title"
`;

/** Tokens as they are shown. A paragraph of an item is drawn like its text, with and without blank lines in the list. */
function outline(tokens: readonly Token[]): unknown[] {
  return tokens
    .filter((token) => token.type !== "space")
    .map((token) => {
      const items = (token as Tokens.List).items?.map((item) => [item.text.trim(), outline(item.tokens)]);
      const type = token.type === "text" ? "paragraph" : token.type;
      return items ? [type, items] : [type, token.raw.trim()];
    });
}

function tokensOf(blocks: readonly Block[]): Token[] {
  return blocks.map((block) => block.token);
}

test("a text that grows by a character at a time is read as it is at once", () => {
  const blocks = new Blocks();
  let shown: Block[] = [];
  for (let end = 1; end <= answer.length; end += 1) shown = blocks.update(answer.slice(0, end), true);
  shown = blocks.update(answer, false);
  assert.deepEqual(outline(tokensOf(shown)), outline(lex(answer)));
});

test("chunks of any size give the same blocks", () => {
  for (const size of [2, 3, 7, 19, 64, 500]) {
    const blocks = new Blocks();
    for (let end = size; end < answer.length; end += size) blocks.update(answer.slice(0, end), true);
    const shown = blocks.update(answer, false);
    assert.deepEqual(outline(tokensOf(shown)), outline(lex(answer)), `chunks of ${size}`);
  }
});

test("no character is lost or doubled while the text grows", () => {
  const blocks = new Blocks();
  const bare = (text: string) => text.replace(/\s+/g, "");
  for (let end = 1; end <= answer.length; end += 1) {
    const text = answer.slice(0, end);
    const raw = blocks
      .update(text, true)
      .map(({ token }) => token.raw)
      .join("");
    assert.equal(bare(raw), bare(text));
  }
});

test("blocks that are complete stay the same objects", () => {
  const blocks = new Blocks();
  let before: Block[] = [];
  for (let end = 1; end <= answer.length; end += 1) {
    const now = blocks.update(answer.slice(0, end), true);
    const kept = Math.max(0, before.length - 2);
    assert.deepEqual(now.slice(0, kept).map((one, at) => one.token === before[at]?.token), Array(kept).fill(true));
    before = now;
  }
  assert.ok(before.length > 15);
});

test("of a list that grows, the items that are complete stay the same objects", () => {
  const blocks = new Blocks();
  let text = "";
  let before: Tokens.ListItem[] = [];
  for (let number = 1; number <= 40; number += 1) {
    for (const part of [`${number}. Point`, ` number ${number}\n`, "    - with a nested point\n"]) {
      text += part;
      const list = blocks.update(text, true)[0]?.token as Tokens.List;
      const settled = before.slice(0, -2);
      assert.ok(settled.every((item, at) => item === list.items[at]));
      before = list.items;
    }
  }
  assert.equal(before.length, 40);
  assert.equal(blocks.update(text, false).length, 1);
});

test("a definition at the end makes the links at the beginning once the text is complete", () => {
  const blocks = new Blocks();
  for (let end = 1; end <= links.length; end += 5) blocks.update(links.slice(0, end), true);
  const shown = blocks.update(links, false);
  assert.deepEqual(outline(tokensOf(shown)), outline(lex(links)));
  const last = shown.findLast(({ token }) => token.type === "paragraph")?.token as Tokens.Paragraph;
  assert.ok(last.tokens.some((token) => token.type === "link"));
});

test("a definition at the end leaves blocks of code as they are", () => {
  const blocks = new Blocks();
  const codeOf = (shown: Block[]) => shown.find(({ token }) => token.type === "code");
  const before = codeOf(blocks.update(links, true));
  const after = codeOf(blocks.update(links, false));
  assert.ok(before);
  assert.equal(after?.key, before.key);
});

test("another text starts again", () => {
  const blocks = new Blocks();
  blocks.update("one\n\ntwo\n\nthree", true);
  assert.deepEqual(outline(tokensOf(blocks.update("- other", true))), [["list", [["other", [["paragraph", "other"]]]]]]);
});

test("lines may end as on Windows", () => {
  const blocks = new Blocks();
  const text = "one\r\n\r\n- two\r\n- three\r\n";
  for (let end = 1; end <= text.length; end += 1) blocks.update(text.slice(0, end), true);
  assert.deepEqual(outline(tokensOf(blocks.update(text, false))), outline(lex(text.replaceAll("\r", ""))));
});

test("a text that is all there is read once", () => {
  const blocks = new Blocks();
  const first = blocks.update(answer, false);
  assert.equal(blocks.update(answer, false), first);
});

/** Numbers from 0 to 1 that are the same each time. */
function* numbers(seed: number): Generator<number, never> {
  for (;;) {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    yield ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  }
}

const pieces = (
  "- a|* b|1. c|10)|  |    |\n|\n|\n\n|\n\n\n|text| more|**bold**|`code`|```|```js|~~~|> |>|# |$$|$x$|\\[|\\]|<div>|<!--|-->" +
  "|---|===|[a]: b|[a](b)|- [ ] t|+|-|1|1.|\t|***|\\|&amp;|https://a.b|a| "
).split("|").concat("| a | b |", "\n|---|---|\n", "|");

test("of any text, in any chunks, nothing is lost or doubled, and its end is right", () => {
  const random = numbers(14);
  const upTo = (most: number) => Math.floor(random.next().value * most);
  const bare = (text: string) => text.replace(/\s+/g, "");
  for (let turn = 0; turn < 300; turn += 1) {
    const text = Array.from({ length: 3 + upTo(22) }, () => pieces[upTo(pieces.length)]).join("");
    const blocks = new Blocks();
    for (let end = 1 + upTo(3); end < text.length; end += 1 + upTo(3)) {
      const shown = tokensOf(blocks.update(text.slice(0, end), true));
      assert.equal(bare(shown.map(({ raw }) => raw).join("")), bare(text.slice(0, end)), JSON.stringify(text));
    }
    assert.deepEqual(outline(tokensOf(blocks.update(text, false))), outline(lex(text)), JSON.stringify(text));
  }
});
