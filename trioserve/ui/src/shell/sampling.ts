/** The settings of sampling: their names, descriptions and valid values. */

import type { Sampling } from "../types";
import { t, type Text } from "../words";

/** A number that a request may set. */
export interface Field {
  name: string;
  label: Text;
  help: Text;
  min?: number;
  max?: number;
  /** True if only whole numbers are allowed. */
  whole?: boolean;
  /** The ends of a slider, where most people stay between them. */
  slider?: readonly [number, number];
}

export interface Group {
  title: Text;
  fields: readonly Field[];
}

const top: Group = {
  title: "Answers",
  fields: [
    { name: "temperature", label: "Temperature", min: 0, slider: [0, 2], help: "Higher is more varied, lower more predictable. At 0 the most likely token is always chosen." },
    { name: "max_tokens", label: "Longest answer", min: -1, whole: true, help: "In tokens; -1 is no limit but the context." },
    { name: "top_p", label: "Top p", min: 0, max: 1, slider: [0, 1], help: "Chooses among the likeliest tokens that have this probability together." },
    { name: "top_k", label: "Top k", min: 0, whole: true, slider: [0, 100], help: "Chooses among this many of the likeliest tokens; 0 is all." },
    { name: "min_p", label: "Min p", min: 0, max: 1, slider: [0, 1], help: "Leaves out tokens that are less likely than this share of the likeliest one." },
    { name: "seed", label: "Seed", min: -1, max: 2 ** 32 - 1, whole: true, help: "The same seed repeats an answer; -1 is a new one each time." },
  ],
};

const repetition: Group = {
  title: "Repetition",
  fields: [
    { name: "repeat_penalty", label: "Repeat penalty", min: 0, slider: [1, 2], help: "Makes tokens of the last text less likely; 1 is off." },
    { name: "repeat_last_n", label: "Repeat window", min: -1, whole: true, help: "How many of the last tokens count; -1 is the whole context." },
    { name: "presence_penalty", label: "Presence penalty", slider: [-2, 2], help: "Against tokens that have occurred at all." },
    { name: "frequency_penalty", label: "Frequency penalty", slider: [-2, 2], help: "Against tokens, the more often they have occurred." },
    { name: "dry_multiplier", label: "DRY multiplier", min: 0, help: "Against repeating whole phrases; 0 is off." },
    { name: "dry_base", label: "DRY base", min: 1, help: "How fast the penalty grows with the length of a phrase." },
    { name: "dry_allowed_length", label: "DRY allowed length", min: -1, whole: true, help: "Phrases up to this many tokens may be repeated." },
    { name: "dry_penalty_last_n", label: "DRY window", min: -1, whole: true, help: "How many of the last tokens are searched; -1 is the whole context." },
  ],
};

const special: Group = {
  title: "Other samplers",
  fields: [
    { name: "typical_p", label: "Typical p", min: 0, max: 1, help: "Prefers tokens that are about as surprising as expected; 1 is off." },
    { name: "top_n_sigma", label: "Top n sigma", help: "Leaves out tokens this many standard deviations below the likeliest; -1 is off." },
    { name: "xtc_probability", label: "XTC probability", min: 0, max: 1, help: "How often the likeliest tokens are left out; 0 is off." },
    { name: "xtc_threshold", label: "XTC threshold", min: 0, max: 1, help: "Which tokens that concerns, by their probability." },
    { name: "dynatemp_range", label: "Dynamic temperature", min: 0, help: "How far the temperature moves with the model's uncertainty; 0 is off." },
    { name: "dynatemp_exponent", label: "Dynamic exponent", min: 0, help: "How it follows the uncertainty." },
    { name: "mirostat", label: "Mirostat", min: 0, max: 2, whole: true, help: "Version 1 or 2, in place of the samplers above; 0 is off." },
    { name: "mirostat_tau", label: "Mirostat tau", min: 0, help: "The surprise that it aims at." },
    { name: "mirostat_eta", label: "Mirostat eta", min: 0, help: "How fast it adapts." },
    { name: "top_logprobs", label: "Alternatives of tokens", min: 0, max: 20, whole: true, help: "Below an answer: how probable each of its tokens was, and this many others." },
  ],
};

/** All fields, as the settings show them: the first group at once, the others folded. */
export const groups: readonly Group[] = [top, repetition, special];

/** A person's text as read: a value, nothing (the default applies), or an error. */
export type Reading = { value: number } | { problem: string } | "default";

/** Read what is written in a field. */
export function read(field: Field, text: string): Reading {
  if (text.trim() === "") return "default";
  const value = Number(text.trim().replace(",", "."));
  if (!Number.isFinite(value)) return { problem: t("This is not a number.") };
  if (field.whole && !Number.isInteger(value)) return { problem: t("This has to be a whole number.") };
  if (field.min !== undefined && value < field.min) return { problem: t("The least is {min}.", { min: field.min }) };
  if (field.max !== undefined && value > field.max) return { problem: t("The most is {max}.", { max: field.max }) };
  return { value };
}

/** A number as a field shows it; the server's single precision is rounded to what was meant. */
export function show(field: Field, value: unknown): string {
  if (typeof value !== "number") return "";
  if (field.name === "seed" && value === 2 ** 32 - 1) return "-1";
  return String(Number(value.toPrecision(field.whole ? 12 : 6)));
}

/** Settings in a line: "temperature 0.2, top p 0.9". */
export function summary(sampling: Sampling): string {
  const labels = new Map(groups.flatMap((group) => group.fields).map((one) => [one.name, t(one.label)]));
  return Object.entries(sampling)
    .map(([name, value]) => {
      if (name === "json_schema") return t("answers follow a schema");
      const shown = Array.isArray(value) ? value.map((one) => JSON.stringify(one)).join(" ") : value;
      return `${(labels.get(name) ?? name.replaceAll("_", " ")).toLowerCase()} ${shown}`;
    })
    .join(", ");
}
