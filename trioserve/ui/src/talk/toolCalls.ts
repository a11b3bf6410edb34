// The arguments of a tool call, as far as they are written, for people to read.

import type { Message } from "../types";

/** Arguments by name, or what was written where that is no JSON object. */
export type Arguments = { named: [name: string, value: string][] } | { raw: string };

/** Read the arguments of a call. */
export function readArguments(written: string): Arguments {
  const value = parse(written);
  if (typeof value !== "object" || value === null || Array.isArray(value)) return { raw: written };
  return { named: Object.entries(value).map(([name, one]) => [name, readable(one)]) };
}

/** JSON on separate lines, other text as it is. */
export function pretty(text: string): { text: string; json: boolean } {
  const value = parse(text);
  if (typeof value !== "object" || value === null) return { text, json: false };
  return { text: JSON.stringify(value, null, 2), json: true };
}

function readable(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

function parse(text: string): unknown {
  if (!/^\s*[{[]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined; // not complete yet, or no JSON
  }
}

/** The tool that each result comes from, by the id of the result's message: the results follow the calls in order. */
export function toolNames(path: readonly Message[]): Map<string, string> {
  const names = new Map<string, string>();
  let waiting: string[] = [];
  for (const { id, role, toolCalls } of path) {
    if (role === "assistant") waiting = toolCalls.map((call) => call.name);
    else if (role === "tool") names.set(id, waiting.shift() ?? "");
  }
  return names;
}
