// Settings and presets, kept in this browser.
//
// A setting that a person has not changed has the value of --ui-config, and else the page's own default.

import { effect, signal, type Signal } from "@preact/signals";

import type { Preset, Sampling, Settings, ToolChoice } from "../types";
import { isObject, isRecord } from "./json";
import { noteUnkept, place } from "./storage";

export const defaults: Settings = {
  apiKey: "",
  theme: "auto",
  language: "auto",
  sendKey: "enter",
  system: "",
  sampling: {},
  model: "",
  tools: { on: [], allowed: [], cwd: "" },
  showReasoning: false,
  showStats: true,
  titles: true,
  dictation: false,
  readAll: false,
  voice: "",
  readSpeed: 1,
  mcp: [],
};

/** At which answers are read aloud. */
export const SPEEDS = [0.75, 1, 1.25, 1.5, 2];

/** Set it to a new object: it is kept, and other tabs get it. */
export const settings: Signal<Settings> = signal(defaults);

export const presets: Signal<Preset[]> = signal([]);

/** The defaults of this server: those of the page, and what `--ui-config` changes in them. */
let base = defaults;

/** Read what is kept, and from now on keep what changes. */
export function startSettings(): void {
  const given = load("defaults");
  base = isRecord(given) ? withDefaults(given) : defaults;
  read();
  effect(() => write("settings", changesFrom(base, settings.value)));
  effect(() => write("presets", presets.value));
  globalThis.addEventListener?.("storage", (event) => {
    if (event.key === null || event.key.startsWith(place(""))) read();
  });
}

/** Take the defaults that the server gives, in our words or in those of llama-server's page. */
export function useServerDefaults(given: Record<string, unknown>): void {
  const changed = changesFrom(base, settings.peek());
  base = withDefaults(given);
  settings.value = { ...base, ...changed };
  write("defaults", given); // so that the next start has them at once
}

function withDefaults(given: Record<string, unknown>): Settings {
  return { ...defaults, ...valid(inOurWords(given)), apiKey: "" }; // a shared key would protect nothing
}

function read(): void {
  const kept = load("settings");
  settings.value = { ...base, ...(isRecord(kept) ? valid(kept) : {}) };
  const list = load("presets");
  presets.value = Array.isArray(list) ? list.filter(isPreset) : [];
}

/** Entries that differ. */
function changesFrom(from: Settings, now: Settings): Partial<Settings> {
  const differs = ([name, value]: [string, unknown]) =>
    JSON.stringify(value) !== JSON.stringify(from[name as keyof Settings]);
  return Object.fromEntries(Object.entries(now).filter(differs));
}

/** Leave out what is unknown, or of the wrong type: it may come from another version. */
function valid(given: Record<string, unknown>): Partial<Settings> {
  const fits = ([name, value]: [string, unknown]): boolean => {
    if (name === "theme") return ["auto", "light", "dark"].includes(value as string);
    if (name === "language") return ["auto", "en", "de", "zh"].includes(value as string);
    if (name === "sendKey") return ["enter", "mod-enter"].includes(value as string);
    if (name === "readSpeed") return SPEEDS.includes(value as number);
    if (name === "sampling") return isSampling(value);
    if (name === "tools") return isToolChoice(value);
    if (name === "mcp") return Array.isArray(value) && value.every(isMcpEntry);
    return Object.hasOwn(defaults, name) && typeof value === typeof defaults[name as keyof Settings];
  };
  return Object.fromEntries(Object.entries(given).filter(fits));
}

export function isSampling(value: unknown): value is Sampling {
  const fits = ([name, one]: [string, unknown]) =>
    name === "json_schema"
      ? typeof one === "string" && isObject(one)
      : ["number", "string", "boolean"].includes(typeof one) ||
        (Array.isArray(one) && one.every((each) => typeof each === "string"));
  return isRecord(value) && Object.entries(value).every(fits);
}

/** The same settings with one of them changed; `undefined` takes it out. */
export function withValue(
  sampling: Sampling,
  name: string,
  value: Sampling[string] | undefined,
): Sampling {
  const { [name]: _, ...rest } = sampling;
  return value === undefined ? rest : { ...rest, [name]: value };
}

function isToolChoice(value: unknown): value is ToolChoice {
  if (!isRecord(value)) return false;
  const areNames = (one: unknown) => Array.isArray(one) && one.every((name) => typeof name === "string");
  return areNames(value.on) && areNames(value.allowed) && typeof value.cwd === "string";
}

function isMcpEntry(value: unknown): boolean {
  return isRecord(value) && ["id", "name", "url", "token"].every((name) => typeof value[name] === "string");
}

function isPreset(value: unknown): value is Preset {
  if (!isRecord(value)) return false;
  const { id, name, system, sampling } = value;
  return [id, name, system].every((one) => typeof one === "string") && isSampling(sampling);
}

/** The settings of llama-server's page that we have, too. */
const THEIR_WORDS: Record<string, (value: unknown) => Partial<Settings>> = {
  systemMessage: (value) => ({ system: value as string }),
  showThoughtInProgress: (value) => ({ showReasoning: value as boolean }),
  showMessageStats: (value) => ({ showStats: value as boolean }),
  titleGenerationUseLLM: (value) => ({ titles: value as boolean }),
  sendOnEnter: (value) => ({ sendKey: value === false ? "mod-enter" : "enter" }),
  theme: (value) => ({ theme: (value === "system" ? "auto" : value) as Settings["theme"] }),
};

const THEIR_SAMPLING = new Set(
  `temperature dynatemp_range dynatemp_exponent top_k top_p min_p typ_p xtc_probability xtc_threshold
  repeat_last_n repeat_penalty presence_penalty frequency_penalty dry_multiplier dry_base
  dry_allowed_length dry_penalty_last_n max_tokens samplers`.split(/\s+/),
);

function inOurWords(given: Record<string, unknown>): Record<string, unknown> {
  const ours: Record<string, unknown> = {};
  const sampling: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(given)) {
    const their = Object.hasOwn(THEIR_WORDS, name) ? THEIR_WORDS[name] : undefined;
    if (THEIR_SAMPLING.has(name)) sampling[name === "typ_p" ? "typical_p" : name] = value;
    else if (their) Object.assign(ours, their(value));
    else if (Object.hasOwn(defaults, name)) ours[name] = value;
  }
  if (Object.keys(sampling).length > 0) {
    ours.sampling = { ...sampling, ...(isRecord(ours.sampling) ? ours.sampling : {}) };
  }
  return ours;
}

function load(name: string): unknown {
  try {
    return JSON.parse(localStorage.getItem(place(name)) ?? "null");
  } catch {
    return null; // blocked, or written by something else
  }
}

function write(name: string, value: unknown): void {
  try {
    const text = JSON.stringify(value);
    if (localStorage.getItem(place(name)) !== text) localStorage.setItem(place(name), text);
  } catch (error) {
    noteUnkept(error);
  }
}
