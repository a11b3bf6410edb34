import assert from "node:assert/strict";
import { test } from "node:test";

import type { Line } from "./highlightCode";
import { Painter, type Coloured } from "./painter";

/** A highlighter that answers on command. */
function scripted() {
  const asked: string[] = [];
  const answers: ((lines: Line[] | null) => void)[] = [];
  const highlight = (code: string) => {
    asked.push(code);
    return new Promise<Line[] | null>((resolve) => answers.push(resolve));
  };
  const answer = async (lines: Line[] | null = [[["keyword", "x"]]]) => {
    answers.shift()?.(lines);
    for (let turn = 0; turn < 3; turn += 1) await new Promise((resolve) => setTimeout(resolve, 0));
  };
  return { asked, highlight, answer };
}

test("code that grows is coloured up to its last complete line, one time after the other", async () => {
  const { asked, highlight, answer } = scripted();
  const shown: Coloured[] = [];
  const painter = new Painter((one) => shown.push(one), highlight, 0);
  painter.want("let a", "js", true);
  assert.deepEqual(asked, []);
  painter.want("let a;\nlet", "js", true);
  painter.want("let a;\nlet b;\nle", "js", true);
  painter.want("let a;\nlet b;\nlet c;\n", "js", true);
  assert.deepEqual(asked, ["let a;\n"]);
  await answer();
  assert.deepEqual(asked, ["let a;\n", "let a;\nlet b;\nlet c;\n"]);
  await answer();
  painter.want("let a;\nlet b;\nlet c;\nend", "js", false);
  assert.equal(asked.at(-1), "let a;\nlet b;\nlet c;\nend");
  await answer();
  assert.deepEqual(shown.map((one) => one.code), asked);
});

test("code without a language stays plain", () => {
  const { asked, highlight } = scripted();
  new Painter(() => assert.fail("nothing to show"), highlight).want("text", "", false);
  assert.deepEqual(asked, []);
});

test("what could not be coloured is not tried again, unless as another language", async () => {
  const { asked, highlight, answer } = scripted();
  const shown: Coloured[] = [];
  const painter = new Painter((one) => shown.push(one), highlight, 0);
  painter.want("a", "nonsense", false);
  await answer(null);
  painter.want("ab", "nonsense", false);
  assert.deepEqual(asked, ["a"]);
  painter.want("ab", "js", false);
  await answer();
  assert.deepEqual(shown.map((one) => one.code), ["ab"]);
});

test("nothing is shown after the end", async () => {
  const { highlight, answer } = scripted();
  const painter = new Painter(() => assert.fail("it has ended"), highlight, 0);
  painter.want("a", "js", false);
  painter.end();
  await answer();
});
