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

test("nor is one whose masks have masks", () => {
  const masks = (levels: number, each: number) =>
    Array.from({ length: levels }, (_, n) => `<mask id="m${n}">${`<rect mask="url(#m${n + 1})"/>`.repeat(each)}</mask>`).join("");
  const of = (inner: string) => `<svg>${inner}<rect mask="url(#m0)"/></svg>`;
  assert.equal(pictureKind("svg", of(masks(2, 4))), "svg");
  assert.equal(pictureKind("svg", of(masks(7, 10))), null);
  assert.equal(pictureKind("svg", of(masks(7, 10).replaceAll("mask", "pattern"))), null);
  assert.equal(pictureKind("svg", of(masks(1, 300))), null);
  const gradient = '<linearGradient x1="0" id="g"/>';
  assert.equal(pictureKind("svg", of(`${gradient}${masks(1, 2)}${'<rect fill="url(#g)"/>'.repeat(300)}`)), "svg");
  assert.equal(pictureKind("svg", of(`<style>rect { mask: url(#m0) }</style>${masks(1, 1)}`)), null);
  assert.equal(pictureKind("svg", "<svg><style>rect { fill: red }</style><rect/></svg>"), "svg");
});

test("nor is one with large markers at many points", () => {
  const of = (elements: number, points: number) =>
    `<svg><marker id="m">${"<path/>".repeat(elements)}</marker><path d="M0 0${"L9 9".repeat(points)}" marker-mid="url(#m)"/></svg>`;
  assert.equal(pictureKind("svg", of(1, 2000)), "svg");
  assert.equal(pictureKind("svg", of(300, 2000)), null);
});

test("no text takes long to look through", async () => {
  assert.equal(pictureKind("", `${"<!---->".repeat(100)}x`), null);
  const tags = "<svg ".repeat(16_000);
  assert.equal(pictureKind("", tags), "svg");
  assert.match(await svgFile(tags).text(), /^<svg xmlns="[^"]+" <svg /);
});

test("a drawing has its namespace, and is read as UTF-8", async () => {
  const named = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><g/></svg>';
  assert.equal(await svgFile(`<?xml version="1.0" encoding="utf-7"?>\n${SVG}\n`).text(), named);
  assert.equal(await svgFile(named).text(), named);
  assert.equal(svgFile(named).type, "image/svg+xml;charset=utf-8");
});
