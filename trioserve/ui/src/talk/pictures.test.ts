import assert from "node:assert/strict";
import { test } from "node:test";

import { pictureKind, svgFile } from "./pictures";

const SVG = '<svg viewBox="0 0 9 9"><g/></svg>';

test("a picture is known by the language of its code, or by its beginning", () => {
  assert.equal(pictureKind("svg", SVG), "svg");
  assert.equal(pictureKind("xml", `<?xml version="1.0"?>\n<!-- a -->\n${SVG}`), "svg");
  assert.equal(pictureKind("", SVG), "svg");
  assert.equal(pictureKind("python", SVG), null);
  assert.equal(pictureKind("svg", "<g/>"), null);
  assert.equal(pictureKind("mermaid", "graph TD"), "mermaid");
  assert.equal(pictureKind("html", "<p>"), "html");
  assert.equal(pictureKind("html", " "), null);
  assert.equal(pictureKind("mermaid", "a".repeat(200_001)), null);
});

test("a drawing that multiplies its parts is no picture", () => {
  const of = (uses: number, elements: number) => `<svg>${"<use/>".repeat(uses)}${"<g/>".repeat(elements)}</svg>`;
  assert.equal(pictureKind("svg", of(12, 200)), "svg");
  assert.equal(pictureKind("svg", of(17, 200)), null);
  assert.equal(pictureKind("svg", of(0, 20_000)), "svg");
  assert.equal(pictureKind("svg", `<svg>${"<feBlend/>".repeat(41)}</svg>`), null);
});

test("no text takes long to look through", async () => {
  assert.equal(pictureKind("", `${"<!---->".repeat(100)}x`), null);
  const tags = "<svg ".repeat(16_000);
  assert.equal(pictureKind("", tags), "svg");
  assert.equal((await svgFile(tags).text()).length, `${tags} xmlns="http://www.w3.org/2000/svg"`.trim().length);
});

test("a drawing has its namespace, and is read as UTF-8", async () => {
  const named = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><g/></svg>';
  assert.equal(await svgFile(`<?xml version="1.0" encoding="utf-7"?>\n${SVG}\n`).text(), named);
  assert.equal(await svgFile(named).text(), named);
  assert.equal(svgFile(named).type, "image/svg+xml;charset=utf-8");
});
