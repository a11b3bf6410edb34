import assert from "node:assert/strict";
import { test } from "node:test";

import { highlightCode, type Line } from "./highlightCode";

function text(lines: Line[]): string {
  return lines.map((line) => line.map(([, piece]) => piece).join("")).join("\n");
}

test("the lines have the text of the code, and its kinds", () => {
  const code = 'def f(x):\n    """Twice\n\n    x."""\n    return x * 2  # done\n';
  const lines = highlightCode(code, "python");
  assert.ok(lines);
  assert.equal(text(lines), code);
  assert.deepEqual(lines[0]?.[0], ["keyword", "def"]);
  assert.deepEqual(lines[3]?.[0], ["string", '    x."""']);
  assert.ok(lines[4]?.some(([kind, piece]) => kind === "comment" && piece === "# done"));
});

test("languages go by several names; others are not known", () => {
  for (const name of ["python", "py", "js", "ts", "tsx", "html", "c++", "sh", "dockerfile", "tex", "ps1", "toml"]) {
    assert.ok(highlightCode("x", name), name);
  }
  for (const name of ["", "nonsense", "__proto__", "constructor"]) assert.equal(highlightCode("x", name), null);
});

test("markup in code is text", () => {
  const code = "<script>alert('&lt;')</script>\n</code></pre>";
  const lines = highlightCode(code, "html");
  assert.equal(text(lines ?? []), code);
});
