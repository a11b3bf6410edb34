import assert from "node:assert/strict";
import { test } from "node:test";

import "../testing/browser";
import { randomFrom } from "../testing/browser";
import { Sentences } from "./spoken";

/** All that is said of a complete text. */
function said(text: string): string {
  const sentences = new Sentences();
  const pieces: string[] = [];
  for (let piece; (piece = sentences.next(text, false)); ) pieces.push(piece);
  return pieces.join(" ");
}

const answer = `# The *title*

A paragraph with **bold**, \`code\`, $a_1 + \\beta$ and [a link](https://example.org/x).
It continues.[^1] See https://example.org/a/long/address?x=1 there.

1. One
   - nested
2. Two, with code:

   \`\`\`python
   print("no")
   \`\`\`
- [x] done

| a | b |
|---|--:|
| 1 | \`2\` |

$$
x = y
$$

\`\`\`
not this.
\`\`\`

> [!NOTE]
> Quoted.

H<sub>2</sub>O<br>&amp; ![a cat](https://example.org/cat.png) 👨‍👩‍👧 ok 🇩🇪!

***

[^1]: A footnote
`;

const words =
  "The title. A paragraph with bold, code, a 1 + beta and a link. It continues. See example.org there. " +
  "One. nested. Two, with code: done. a, b. 1, 2. Note. Quoted. H2O & a cat ok ! A footnote.";

test("what is said is the text, without marks, code and pictures", () => {
  assert.equal(said(answer), words);
});

test("of an answer with only code, nothing is said", () => {
  for (const text of ["", "\n\n", "```\ncode.\n```", "***", "👍", "$$\nx\n$$"]) assert.equal(said(text), "");
});

test("while an answer grows, each sentence is said once, and only when it is complete", () => {
  for (let seed = 0; seed < 40; seed++) {
    const random = randomFrom(seed);
    const sentences = new Sentences();
    const pieces: string[] = [];
    for (let end = 0; end < answer.length; ) {
      end = Math.min(answer.length, end + 1 + Math.floor(random() * 12));
      const piece = sentences.next(answer.slice(0, end), true);
      if (piece) pieces.push(piece);
    }
    for (let piece; (piece = sentences.next(answer, false)); ) pieces.push(piece);
    assert.equal(pieces.join(" "), words, `seed ${seed}`);
    assert.ok(pieces.length > 5);
  }
});

test("what comes at once is said in pieces that end with a sentence", () => {
  const sentences = new Sentences();
  const text = Array.from({ length: 60 }, (_, at) => `This is sentence number ${at}.`).join(" ");
  const pieces = [sentences.next(text, false), sentences.next(text, false)];
  for (const piece of pieces) assert.ok(piece.length > 400 && piece.length <= 500 && piece.endsWith("."));
  assert.ok(text.startsWith(pieces.join(" ")));
});

test("a text without sentences is cut between words, or else anywhere", () => {
  for (const text of ["word ".repeat(400).trim(), "字".repeat(1800), `a ${"b".repeat(900)} c`]) {
    const sentences = new Sentences();
    const pieces: string[] = [];
    for (let piece; (piece = sentences.next(text, false)); ) pieces.push(piece);
    assert.ok(pieces.every(({ length }) => length <= 500));
    assert.equal(pieces.join("").replaceAll(/[\s.]/g, ""), text.replaceAll(" ", ""));
  }
  assert.ok(said("several ".repeat(900)).split(" ").every((one) => /^several\.?$/.test(one)));
});

test("a paragraph of any length is said to its end, without a copy of it for each sentence", () => {
  const text = Array.from({ length: 15_000 }, (_, at) => `This is sentence number ${at}.`).join(" ");
  assert.equal(said(text), text);
});

test("sentences of other scripts are recognized, and signs of direction left out", () => {
  const spoken = (text: string) => new Sentences().next(text, true);
  assert.equal(spoken("第一句。第二句！第三"), "第一句。 第二句！");
  assert.equal(spoken("هل هذا سؤال؟ \u202bنعم\u202c. لا"), "هل هذا سؤال؟ نعم.");
  assert.equal(said("שלום\u200f עולם"), "שלום עולם.");
});
