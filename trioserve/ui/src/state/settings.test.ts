import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { localStorageFake } from "../testing/browser";
import { defaults, presets, settings, startSettings, useServerDefaults } from "./settings";

const place = "trioserve/prefix/";
const kept = (name: string) => JSON.parse(localStorageFake.getItem(place + name) ?? "null");

/** As after a reload: only what is kept is there. */
function reload(): void {
  startSettings();
}

beforeEach(() => {
  useServerDefaults({});
  settings.value = defaults;
  presets.value = [];
  localStorageFake.clear();
  reload();
});

test("only what a person has changed is kept", () => {
  settings.value = { ...settings.peek(), theme: "dark", sampling: { top_k: 5 } };
  assert.deepEqual(kept("settings"), { theme: "dark", sampling: { top_k: 5 } });
  settings.value = { ...settings.peek(), theme: "auto" };
  assert.deepEqual(kept("settings"), { sampling: { top_k: 5 } });
  presets.value = [{ id: "1", name: "Brief", system: "Be brief.", sampling: {} }];
  reload();
  assert.deepEqual(settings.peek(), { ...defaults, sampling: { top_k: 5 } });
  assert.equal(presets.peek()[0]!.name, "Brief");
});

test("the server's defaults are under what a person has changed, also after a reload", () => {
  settings.value = { ...settings.peek(), showStats: false };
  useServerDefaults({ theme: "dark", system: "House rules", showStats: true, apiKey: "secret" });
  const wanted = { ...defaults, theme: "dark", system: "House rules", showStats: false };
  assert.deepEqual(settings.peek(), wanted);
  settings.value = { ...settings.peek(), theme: "auto" }; // which is the page's own default
  reload();
  assert.deepEqual(settings.peek(), { ...wanted, theme: "auto" });
});

test("llama-server's words for the same settings are understood", () => {
  useServerDefaults({
    systemMessage: "Hi", theme: "system", sendOnEnter: false, temperature: 0.2, typ_p: 0.9,
    showMessageStats: false, showThoughtInProgress: true, mcpServers: "x",
  });
  assert.deepEqual(settings.peek(), {
    ...defaults, system: "Hi", sendKey: "mod-enter", showStats: false, showReasoning: true,
    sampling: { temperature: 0.2, typical_p: 0.9 },
  });
});

test("what is damaged or of another version is left out", () => {
  localStorageFake.setItem(`${place}settings`, JSON.stringify({
    theme: "pink", sendKey: 5, system: ["x"], sampling: { top_k: {} }, model: "m", other: 1,
  }));
  localStorageFake.setItem(`${place}presets`, JSON.stringify([5, { id: "1", name: "x" }]));
  reload();
  assert.deepEqual([settings.peek(), presets.peek()], [{ ...defaults, model: "m" }, []]);
  localStorageFake.setItem(`${place}settings`, "{");
  reload();
  assert.deepEqual(settings.peek(), defaults);
});

test("the tools of new chats are taken as a whole, or not at all", () => {
  const tools = { on: ["read_file"], allowed: [], cwd: "" };
  useServerDefaults({ tools });
  assert.deepEqual(settings.peek().tools, tools);
  for (const damaged of [["read_file"], { on: [1], allowed: [], cwd: "" }, { on: [], allowed: [] }, null]) {
    useServerDefaults({ tools: damaged });
    assert.deepEqual(settings.peek().tools, defaults.tools);
  }
});
