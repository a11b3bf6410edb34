import assert from "node:assert/strict";
import { test } from "node:test";

import { Blocks } from "./blocks";
import type { Tokens } from "./lexer";

interface Container {
  type: string;
  items?: Container[];
  tokens?: Container[];
  text?: string;
}

/** The inline tokens at the end of a text, as kinds and texts. */
function end(text: string, writing = true): unknown[] {
  let token = new Blocks().update(text, writing).at(-1)?.token as Container | undefined;
  while (token?.type === "list" || token?.type === "blockquote") {
    token = (token.items?.at(-1) ?? token).tokens?.at(-1);
  }
  return (token?.tokens ?? []).map((one) => [one.type, one.text]);
}

test("bold text and code are shown as such before they end", () => {
  assert.deepEqual(end("so **bol"), [["text", "so "], ["strong", "bol"]]);
  assert.deepEqual(end("so **bold**"), [["text", "so "], ["strong", "bold"]]);
  assert.deepEqual(end("so `cod"), [["text", "so "], ["codespan", "cod"]]);
  assert.deepEqual(end("1. a\n2. **Poi"), [["strong", "Poi"]]);
  assert.deepEqual(end("> - **Poi"), [["strong", "Poi"]]);
  assert.deepEqual(end("## A `tit"), [["text", "A "], ["codespan", "tit"]]);
});

test("a mark alone is not shown yet", () => {
  assert.deepEqual(end("so **"), [["text", "so "]]);
  assert.deepEqual(end("so `"), [["text", "so "]]);
  assert.deepEqual(end("so\n``"), [["text", "so\n"]]);
  assert.deepEqual(end("so *"), [["text", "so "]]);
});

test("marks that begin nothing stay", () => {
  assert.deepEqual(end("2 ** 3"), [["text", "2 ** 3"]]);
  assert.deepEqual(end("a ` b"), [["text", "a ` b"]]);
  assert.deepEqual(end("2*3 and 4"), [["text", "2*3 and 4"]]);
});

test("once a text is complete, it is what it is", () => {
  assert.deepEqual(end("so **bol", false), [["text", "so **bol"]]);
});

test("code is left alone", () => {
  const blocks = new Blocks().update("```\na **b", true);
  assert.equal((blocks[0]?.token as Tokens.Code).text, "a **b");
});
