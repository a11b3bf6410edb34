// The figures under an answer.

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
    list.push({ text: speed(stats.tokensPerSecond), title: t("Generation speed") });
  }
  if (stats.ttft > 0) {
    list.push({ text: t("{ttft} to first token", { ttft: first(stats.ttft) }), title: t("Time to first token") });
  }
  if (stats.tokens > 0) list.push({ text: tokens(stats.tokens), title: `${t("Length of the answer")}${prompt(stats)}` });
  if (stats.contextUsed > 0) {
    list.push({ text: context(stats), title: t("Used share of the model’s context") });
  }
  return list;
}

function first(milliseconds: number): string {
  return milliseconds < 995 ? `${Math.round(milliseconds)} ms` : seconds(milliseconds / 1000);
}

function prompt({ promptTokens, cachedTokens }: Stats): string {
  if (promptTokens <= 0) return "";
  const values = { tokens: tokens(promptTokens), cached: count(cachedTokens) };
  const says = cachedTokens > 0 ? t("prompt: {tokens}, {cached} of them cached", values) : t("prompt: {tokens}", values);
  return ` · ${says}`;
}

function context({ contextUsed, contextSize }: Stats): string {
  if (contextSize <= 0) return t("{contextUsed} of context", { contextUsed: count(contextUsed) });
  return t("{contextUsed} of context", { contextUsed: percent(contextUsed / contextSize) });
}
