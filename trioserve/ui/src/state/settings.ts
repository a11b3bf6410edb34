// Settings and presets, kept in this browser.

import { signal, type Signal } from "@preact/signals";

import type { Preset, Settings } from "../types";

export const defaults: Settings = {
  apiKey: "",
  theme: "auto",
  sendKey: "enter",
  system: "",
  sampling: {},
  model: "",
  showReasoning: false,
  showStats: true,
};

/** Set it to a new object: it is kept, and other tabs get it. */
export const settings: Signal<Settings> = signal(defaults);

export const presets: Signal<Preset[]> = signal([]);
