import assert from "node:assert/strict";
import { test } from "node:test";
import { type Press, keyNames, shortcutOf, shortcuts } from "./keys";

function press(key: string, ...modifiers: ("ctrl" | "meta" | "shift" | "alt")[]): Press {
  const has = (name: "ctrl" | "meta" | "shift" | "alt") => modifiers.includes(name);
  return {
    key, ctrlKey: has("ctrl"), metaKey: has("meta"), shiftKey: has("shift"), altKey: has("alt"),
  };
}

test("each shortcut is found by its own keys, on a Mac with ⌘", () => {
  for (const mac of [false, true]) {
    for (const one of shortcuts) {
      const modifiers = [
        ...(one.mod ? [mac ? "meta" as const : "ctrl" as const] : []),
        ...(one.shift ? ["shift" as const] : []),
        ...(one.alt ? ["alt" as const] : []),
      ];
      assert.equal(shortcutOf(press(one.key, ...modifiers), false, mac)?.command, one.command);
    }
  }
});

test("where text is written, plain keys are text", () => {
  assert.equal(shortcutOf(press("?"), true, false), undefined);
  assert.equal(shortcutOf(press("/"), true, false), undefined);
  assert.equal(shortcutOf(press("k", "ctrl"), true, false)?.command, "search");
});

test("a question mark is one with Shift and without", () => {
  assert.equal(shortcutOf(press("?", "shift"), false, false)?.command, "help");
  assert.equal(shortcutOf(press("?"), false, false)?.command, "help");
});

test("other modifiers make it another key", () => {
  assert.equal(shortcutOf(press("k", "ctrl", "shift"), false, false), undefined);
  assert.equal(shortcutOf(press("k", "ctrl", "alt"), false, false), undefined);
  assert.equal(shortcutOf(press("k", "meta"), false, false), undefined);
  assert.equal(shortcutOf(press("k", "ctrl"), false, true), undefined);
  assert.equal(shortcutOf(press("o", "ctrl"), false, false), undefined);
  assert.equal(shortcutOf(press("O", "ctrl", "shift"), false, false)?.command, "new-chat");
});

test("keys have the names that are printed on them", () => {
  assert.deepEqual(keyNames({ key: "o", mod: true, shift: true }, false), ["Ctrl", "Shift", "O"]);
  assert.deepEqual(keyNames({ key: "ArrowUp", alt: true }, true), ["⌥", "↑"]);
});
