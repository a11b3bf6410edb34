import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { afterEach, test } from "node:test";

import "./testing/browser";
import { count, seconds } from "./shell/format";
import { settings } from "./state/settings";
import { translations } from "./translations";
import { LANGUAGES, several, startWords, t } from "./words";

Object.assign(document, { documentElement: { lang: "" } });

const browserSpeaks = (language: string) => Object.defineProperty(globalThis, "navigator", { value: { language }, configurable: true });

const speak = async (language: "auto" | keyof typeof LANGUAGES) => {
  settings.value = { ...settings.peek(), language };
  await startWords();
};

afterEach(() => speak("en"));

const valuesIn = (text: string) => (text.match(/\{\w+\}/g) ?? []).sort();

test("each text has a translation with the same values", () => {
  for (const [text, said] of Object.entries(translations)) {
    assert.equal(said.length, Object.keys(LANGUAGES).length - 1);
    for (const one of said) {
      assert.notEqual(one.trim(), "", text);
      assert.deepEqual(valuesIn(one), valuesIn(text), text);
    }
  }
});

test("each text of the table is one of the page", () => {
  const files = readdirSync("src", { recursive: true, encoding: "utf8" }).filter((name) => /(?<!\.test)\.tsx?$/.test(name) && !name.includes("translations"));
  const sources = files.map((name) => readFileSync(join("src", name), "utf8")).join("\n");
  for (const text of Object.keys(translations)) assert.ok(sources.includes(JSON.stringify(text)), text);
});

test("texts and numbers are those of the language in the settings, or of the browser", async () => {
  assert.equal(t("Regenerate"), "Regenerate");
  await speak("de");
  assert.equal(t("Regenerate"), "Neu erzeugen");
  assert.equal(t("Slot {id}", { id: 3 }), "Slot 3");
  assert.deepEqual([count(1234), seconds(0.42)], ["1.234", "0,4 s"]);
  assert.equal(document.documentElement.lang, "de");
  await speak("zh");
  assert.equal(several(2, "{number} chat", "{number} chats", { number: 2 }), "2 个对话");
  browserSpeaks("de-AT");
  await speak("auto");
  assert.equal(t("Settings"), "Einstellungen");
  browserSpeaks("fr-FR");
  await speak("auto");
  assert.equal(t("Settings"), "Settings");
});

test("what is put into a text stays as it is", () => {
  assert.equal(t("{title} was deleted.", { title: "{title} $& <b>" }), "{title} $& <b> was deleted.");
});
