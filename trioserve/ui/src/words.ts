// The texts of the page, in the language of the person. A new text is a row in `translations.ts`.

import { computed, effect, signal } from "@preact/signals";

import { settings } from "./state/settings";
import type { translations } from "./translations";

/** A text of the page, in English, with the names of its values in braces. */
export type Text = keyof typeof translations;

/** The languages by the names that their speakers have for them. */
export const LANGUAGES = { en: "English", de: "Deutsch", zh: "中文" } as const;

type Values = Record<string, string | number | undefined>;

type Language = keyof typeof LANGUAGES;

/** The language that is wanted: of the settings, or else of the browser. */
const wanted = computed<Language>(() => {
  const { language } = settings.value;
  if (language !== "auto") return language;
  const own = navigator.language.slice(0, 2);
  return Object.hasOwn(LANGUAGES, own) ? (own as Language) : "en";
});

const COLUMNS: Record<Language, number | null> = { en: null, de: 0, zh: 1 };

/** The language in use: the wanted one, once its texts are there. */
const spoken = signal<{ language: Language; texts: Record<string, readonly string[]> }>({ language: "en", texts: {} });

/** The language of what the page shows, for numbers and dates as well. */
export const language = computed(() => spoken.value.language);

/** Speak the wanted language from now on. Returns once the texts of the first one are there. */
export async function startWords(): Promise<void> {
  let first: Promise<void> | undefined;
  effect(() => {
    const loading = load(wanted.value);
    first ??= loading;
  });
  await first;
}

/** Load a language. English is in the page itself. */
async function load(next: Language): Promise<void> {
  try {
    const texts = next === "en" ? {} : (await import("./translations")).translations;
    if (next === wanted.peek()) spoken.value = { language: next, texts };
    document.documentElement.lang = spoken.peek().language;
  } catch (error) {
    console.warn("The page stays in the language that it has:", error); // the server is away
  }
}

/** A text in the language of the person. */
export function t(text: Text, values: Values = {}): string {
  const { language: now, texts } = spoken.value;
  const column = COLUMNS[now];
  const said = (column !== null && texts[text]?.[column]) || text;
  return said.replace(/\{(\w+)\}/g, (all, name: string) => String(name in values ? values[name] ?? "" : all));
}

/** The one or the other text, by a number of things. */
export function several(number: number, one: Text, more: Text, values: Values): string {
  return t(number === 1 ? one : more, values);
}
