// Markdown as elements.

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { Window } from "happy-dom";
import { Marked } from "marked";
import { render } from "preact";

import { Block } from "./Block";
import { lex } from "./lexer";
import type { MathsToken } from "./mathsSyntax";

const window = new Window({ url: "http://localhost:8080/" });

before(() => {
  Object.assign(globalThis, { document: window.document, window });
});

function html(text: string, open = false): string {
  const place = window.document.createElement("div");
  render(
    <>
      {lex(text, open).map((token, index) => (
        <Block key={index} token={token} open={open} />
      ))}
    </>,
    place as unknown as Element,
  );
  return place.innerHTML;
}

const same: [name: string, text: string, html: string][] = [
  ["a paragraph", "one *two* **three** ~~four~~ `<b>`", "<p>one <em>two</em> <strong>three</strong> <del>four</del> <code>&lt;b&gt;</code></p>"],
  ["a heading", "# Title", "<h2>Title</h2>"],
  ["a small heading", "###### Title", "<h6>Title</h6>"],
  ["a list", "- a\n- b", "<ul><li>a</li><li>b</li></ul>"],
  ["a list that begins later", "3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
  ["a line of dashes under a text", "Items:\n-", "<p>Items:\n-</p>"],
  ["a rule", "a\n\n---", "<p>a</p><hr>"],
  ["a quote", "> a\n> b", "<blockquote><p>a\nb</p></blockquote>"],
  ["references of characters", "&lt;b&gt; &amp;amp; &#8364; &nope; &copy", "<p>&lt;b&gt; &amp;amp; € &amp;nope; &amp;copy</p>"],
  ["escapes", "\\*a\\* 1\\. b", "<p>*a* 1. b</p>"],
  ["elements without attributes", "H<sub>2</sub>O<br>x<SUP>2</SUP>", "<p>H<sub>2</sub>O<br>x<sup>2</sup></p>"],
  ["elements that do not close", "a<sub>b <kbd>c</sub> d</kbd>", "<p>a<sub>b &lt;kbd&gt;c</sub> d&lt;/kbd&gt;</p>"],
  ["prices are no maths", "It costs $5 and $10, or US$3.", "<p>It costs $5 and $10, or US$3.</p>"],
  ["variables are no maths", "$HOME:$PATH and ${x}$y", "<p>$HOME:$PATH and ${x}$y</p>"],
  ["brackets are no maths", "see \\[1\\]", "<p>see [1]</p>"],
];

for (const [name, text, expected] of same) {
  test(name, () => assert.equal(html(text), expected));
}

test("a table has its alignment, and can be scrolled by keyboard", () => {
  const shown = html("| a | b |\n|---|--:|\n| 1 | `2` |");
  assert.match(shown, /^<div class="table" role="region" aria-label="Table" tabindex="0"><table>/);
  assert.match(shown, /<thead><tr><th>a<\/th><th class="to-right">b<\/th><\/tr><\/thead>/);
  assert.match(shown, /<tbody><tr><td>1<\/td><td class="to-right"><code>2<\/code><\/td><\/tr><\/tbody>/);
});

test("an alert has its kind as a title, and a quote that names none is a quote", () => {
  const shown = html("> [!Tip]\n> a *b*\n>\n> c");
  assert.match(shown, /^<aside class="alert tip" aria-label="Tip"><p class="alert-title"><svg.*<\/svg>Tip<\/p>/);
  assert.match(shown, /<p>a <em>b<\/em><\/p><p>c<\/p><\/aside>$/);
  for (const text of ["> [!TIP] a", "> [!OTHER]\n> a", "> a\n> [!TIP]", "> [!TIP]*a*"]) {
    assert.match(html(text), /^<blockquote>/, text);
  }
  assert.match(html("> [!NOTE]"), /<\/p><\/aside>$/);
});

test("a footnote is one where it has a text", () => {
  const shown = html("a[^1] b[^x y] [^2] `[^1]`\n[^1]: https://example.org\n  c\n\n    [^2]: code");
  assert.match(shown, /^<p>a<sup><button [^>]*aria-label="Footnote 1">1<\/button><\/sup> b\[\^x y\] \[\^2\] <code>\[\^1\]<\/code><\/p>/);
  assert.match(shown, /<p class="footnote" data-footnote="1" tabindex="-1">.*<bdi>https:\/\/example\.org<\/bdi><\/a>\n {2}c<\/p>/);
});

test("a task shows whether it is done", () => {
  assert.match(html("- [x] a"), /^<ul><li class="task"><input type="checkbox" disabled="" aria-label="Done">a<\/li>/);
});

test("a block of code shows its language and its text", () => {
  const shown = html("```Python title\nif a < b:\n\n    pass\n```");
  assert.match(shown, /<span class="language">python<\/span>/);
  assert.match(shown, /<pre[^>]*><code><span class="lines">if a &lt; b:\n\n {4}pass<\/span><\/code><\/pre>/);
});

test("code in a list loses the list's indentation only", () => {
  assert.match(html("1. a\n   ```\n   x\n     y\n   ```"), /<span class="lines">x\n {2}y<\/span>/);
});

/** The formulas of a text; those for display in brackets. */
function formulas(text: string): unknown[] {
  const found: unknown[] = [];
  new Marked().walkTokens(lex(text), (token) => {
    const { type, text, display } = token as MathsToken;
    if (/^maths/.test(type)) found.push(display ? [text] : text);
  });
  return found;
}

test("maths are found where they are meant", () => {
  assert.deepEqual(formulas("so $x_1 + y_1$ is $a$, not *$b$*"), ["x_1 + y_1", "a", "b"]);
  assert.deepEqual(formulas("so \\(x * y * z\\) is"), ["x * y * z"]);
  assert.deepEqual(formulas("so $$x$$ is \\[y = 1\\]"), [["x"], ["y = 1"]]);
  assert.deepEqual(formulas("$$\na\n- b\n$$"), [["a\n- b"]]);
  assert.deepEqual(formulas("text\n$$\na\n$$\ntext"), [["a"]]);
  assert.deepEqual(formulas("\\[\na = b\n\\]\n\nend"), [["a = b"]]);
  assert.deepEqual(formulas("- a\n  $$\n  x\n  $$"), [["x"]]);
  assert.deepEqual(formulas("| $a$ | b |\n|---|---|\n| 1 | $c$ |"), ["a", "c"]);
  assert.deepEqual(formulas("`$a$` and\n\n```\n$$a$$\n```"), []);
  assert.deepEqual(formulas("$$a\n\nb$$ and $ a $ and $a $ and x$a$"), []);
});

test("maths that are being written wait for their end", () => {
  assert.equal(html("$$\na\n- b", true), '<p class="maths display source">$$\na\n- b</p>');
  assert.equal(html("$$\na\n\n- b", true), "<p>$$\na</p><ul><li>b</li></ul>");
});

test("a link opens apart from the page", () => {
  assert.equal(
    html("[a](https://example.org/b)"),
    '<p><a href="https://example.org/b" title="https://example.org/b" target="_blank" ' +
      'rel="noopener noreferrer nofollow"><bdi>a</bdi></a></p>',
  );
});
