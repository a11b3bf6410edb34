import assert from "node:assert/strict";
import { test } from "node:test";

import { localStorageFake } from "./testing/browser";

test("the page begins as it was left: with the theme chosen here, or else with the server's", async () => {
  const root = { dataset: {} as Record<string, string> };
  Object.assign(document, { documentElement: root });
  Object.assign(globalThis, { sessionStorage: { getItem: () => null } });
  const keep = (name: string, value: string) => localStorageFake.setItem(`trioserve/prefix/${name}`, value);
  keep("settings", '{"theme": "dark"}');
  keep("sidebar", "hidden");
  const { keptTheme } = await import("./early");
  assert.deepEqual(root.dataset, { theme: "dark", sidebar: "hidden" });
  keep("defaults", '{"theme": "light"}');
  assert.equal(keptTheme(), "dark");
  keep("settings", '{"showStats": false}');
  assert.equal(keptTheme(), "light");
  for (const odd of ['{"theme": "system"}', '{"theme": "pink"}', "null", "5", "{"]) {
    keep("defaults", odd);
    assert.equal(keptTheme(), undefined, odd);
  }
});
