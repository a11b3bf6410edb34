/** Numbers, sizes, times and dates as the page writes them. */

import { computed } from "@preact/signals";

import type { Model } from "../types";
import { language, several, t } from "../words";

const whole = computed(() => new Intl.NumberFormat(language.value));
const compact = computed(() => new Intl.NumberFormat(language.value, { notation: "compact", maximumFractionDigits: 1 }));
const tenths = computed(() => new Intl.NumberFormat(language.value, { minimumFractionDigits: 1, maximumFractionDigits: 1 }));
const month = computed(() => new Intl.DateTimeFormat(language.value, { month: "long", year: "numeric" }));

/** 1234 as "1,234". */
export function count(value: number): string {
  return whole.value.format(Math.round(value));
}

/** 1234 as "1.2K". */
export function short(value: number): string {
  return compact.value.format(value);
}

/** "1 token", "2 tokens". */
export function tokens(value: number): string {
  return several(Math.round(value), "{number} token", "{number} tokens", { number: count(value) });
}

/** A context of 4096 tokens as "4K", as people call it. */
export function contextSize(value: number): string {
  return value >= 1024 && value % 1024 === 0 ? `${count(value / 1024)}K` : short(value);
}

/** Bytes, in units of 1000. */
export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 && unit > 0 ? tenths.value.format(value) : Math.round(value)} ${units[unit]}`;
}

/** Seconds: "0.4 s", "12 s", "2 min", "1 h 5 min". */
export function seconds(value: number): string {
  if (value < 9.95) return `${tenths.value.format(value)} s`;
  if (value < 59.5) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  const rest = minutes % 60;
  return `${Math.floor(minutes / 60)} h${rest ? ` ${rest} min` : ""}`;
}

/** A speed: "45 tokens/s", with a decimal where it is slow. */
export function speed(value: number): string {
  const number = value > 0 && value < 9.95 ? tenths.value.format(value) : count(value);
  return t("{number} tokens/s", { number });
}

/** A share of 1 as a percentage that is 0 or 100 only if it is so. */
export function percent(share: number): string {
  const rounded = Math.round(share * 100);
  if (share > 0 && rounded === 0) return "<1%";
  if (share < 1 && rounded === 100) return "99%";
  return `${rounded}%`;
}

/** The heading under which a chat of that time is listed. Times are those of Date.now(). */
export function era(time: number, now: number): string {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  const days = Math.ceil((midnight - time) / 86_400_000);
  if (days <= 0) return t("Today");
  if (days === 1) return t("Yesterday");
  if (days <= 7) return t("Previous 7 days");
  if (days <= 30) return t("Previous 30 days");
  return month.value.format(time);
}

/** The name of a model without its folder and the ending of its file. */
export function modelName(id: string): string {
  return id.slice(id.lastIndexOf("/") + 1).replace(/\.gguf$/i, "") || id;
}

/** A text in quotes, in which it stays: one that runs from right to left turns nothing beside it. */
export function quoted(text: string): string {
  return `“\u2068${text}\u2069”`;
}

/** The properties of a model, in a line. */
export function describe(model: Model): string {
  const states: Record<string, string> = {
    unloaded: t("not loaded"),
    downloading: t("is being downloaded"),
    loading: t("is loading"),
    sleeping: t("sleeps"),
  };
  const share = model.progress === undefined ? "" : `, ${percent(model.progress)}`;
  const state = states[model.status];
  return [
    model.toy && t("toy model"),
    model.failed ? t("has failed") : state && state + share,
    model.parameters > 0 && t("{number} parameters", { number: short(model.parameters) }),
    model.size > 0 && bytes(model.size),
    model.contextSize > 0 && t("{size} context", { size: contextSize(model.contextSize) }),
  ]
    .filter(Boolean)
    .join(" · ");
}
