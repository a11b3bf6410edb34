// What is said under an answer, in figures.

import { count, percent, seconds, speed, tokens } from "../shell/format";
import type { Stats } from "../types";
import { t } from "../words";

/** A thing to say of an answer: in short, and what it means. */
export interface Figure {
  text: string;
  title: string;
}

/** Speed, time to the first token, length, and what of the context is used, as far as they are known. */
export function figures(stats: Stats): Figure[] {
  const list: Figure[] = [];
  if (stats.tokensPerSecond > 0) {
    list.push({ text: speed(stats.tokensPerSecond), title: t("How fast the answer was written") });
  }
  if (stats.ttft > 0) {
    list.push({ text: t("{ttft} to first token", { ttft: first(stats.ttft) }), title: t("The time from sending to the first token") });
  }
  if (stats.tokens > 0) list.push({ text: tokens(stats.tokens), title: t("The length of the answer.{stats}", { stats: prompt(stats) }) });
  if (stats.contextUsed > 0) {
    list.push({ text: context(stats), title: t("How much of the model’s context this chat takes up") });
  }
  return list;
}

function first(milliseconds: number): string {
  return milliseconds < 995 ? `${Math.round(milliseconds)} ms` : seconds(milliseconds / 1000);
}

function prompt({ promptTokens, cachedTokens }: Stats): string {
  if (promptTokens <= 0) return "";
  const cached = cachedTokens > 0 ? t(", {cachedTokens} of them from the cache", { cachedTokens: count(cachedTokens) }) : "";
  return t(" The prompt had {promptTokens}{cached}.", { promptTokens: tokens(promptTokens), cached });
}

function context({ contextUsed, contextSize }: Stats): string {
  if (contextSize <= 0) return t("{contextUsed} of context", { contextUsed: count(contextUsed) });
  return t("{contextUsed} of context", { contextUsed: percent(contextUsed / contextSize) });
}
