// The probabilities of the tokens of an answer.

import type { TokenOdds } from "../types";
import { isRecord } from "./json";

/** Read the `logprobs` of a choice. */
export function oddsIn({ content }: Record<string, unknown>): TokenOdds[] {
  return list(content).map((token) => ({ ...oneOf(token), others: list(token.top_logprobs).map(oneOf) }));
}

function list(value: unknown): Record<string, unknown>[] {
  return Array.isArray(value) ? value.filter(isRecord) : [];
}

function oneOf({ token, logprob }: Record<string, unknown>): { text: string; probability: number } {
  return { text: String(token), probability: typeof logprob === "number" ? Math.exp(logprob) : 0 };
}
