// The changes of the page while an answer is written.

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { Window } from "happy-dom";
import { render } from "preact";

import { Markdown } from "./Markdown";

const window = new Window({ url: "http://localhost:8080/" });

before(() => {
  Object.assign(globalThis, { document: window.document, window });
});

const opening = `# A title

A paragraph with **bold** text.

1. One
    - nested
2. Two
3. Three
`;

/** Draw a text as it grows by a few characters at a time; each drawing waits for its turn. */
async function grow(place: Element, from: string, to: string): Promise<void> {
  for (let end = from.length; end <= to.length; end += 3) {
    render(<Markdown text={to.slice(0, end)} writing />, place);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  render(<Markdown text={to} writing={false} />, place);
  await new Promise((resolve) => setTimeout(resolve, 5));
}

test("while a text grows, what is complete stays as it is on the page", async () => {
  const place = window.document.createElement("div") as unknown as Element;
  render(<Markdown text={opening} writing />, place);
  const kept = [...place.querySelectorAll("h2, p, li:first-child, li:first-child *")];
  assert.equal(kept.length, 5);
  const changed: unknown[] = [];
  const observer = new window.MutationObserver((records) => changed.push(...records));
  for (const one of kept) {
    observer.observe(one as never, { childList: true, subtree: true, characterData: true, attributes: true });
  }
  const text = `${opening}4. Four\n5. Five\n\nAnd a paragraph after it.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n`;
  await grow(place, opening, text);
  assert.deepEqual(changed, []);
  assert.deepEqual([...place.querySelectorAll("h2, p, li:first-child, li:first-child *")].slice(0, 5), kept);
  assert.equal(place.querySelectorAll("ol > li").length, 5);
  assert.equal(place.querySelectorAll("td").length, 2);
});

test("the end of a text is shown even if it comes while the page waits", async () => {
  const place = window.document.createElement("div") as unknown as Element;
  for (let end = 1; end <= opening.length; end += 1) render(<Markdown text={opening.slice(0, end)} writing />, place);
  await new Promise((resolve) => setTimeout(resolve, 200));
  assert.match(place.textContent ?? "", /Three/);
});

test("a link whose definition comes at the end is a link once the text is complete", async () => {
  const place = window.document.createElement("div") as unknown as Element;
  await grow(place, "", "See [there][1].\n\nAnd more.\n\n[1]: https://example.org/\n");
  assert.equal(place.querySelector("a")?.getAttribute("href"), "https://example.org/");
});
