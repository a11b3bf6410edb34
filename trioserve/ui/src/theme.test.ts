import assert from "node:assert/strict";
import { test } from "node:test";

import { localStorageFake } from "./testing/browser";

test("the page begins with the theme that was chosen here, or else with the server's", async () => {
  const root = { dataset: {} as Record<string, string> };
  Object.assign(document, { documentElement: root });
  const keep = (name: string, value: string) => localStorageFake.setItem(`trioserve/prefix/${name}`, value);
  keep("settings", '{"theme": "dark"}');
  const { keptTheme } = await import("./theme");
  assert.deepEqual(root.dataset, { theme: "dark" });
  keep("defaults", '{"theme": "light"}');
  assert.equal(keptTheme(), "dark");
  keep("settings", '{"showStats": false}');
  assert.equal(keptTheme(), "light");
  for (const odd of ['{"theme": "system"}', '{"theme": "pink"}', "null", "5", "{"]) {
    keep("defaults", odd);
    assert.equal(keptTheme(), undefined, odd);
  }
});
