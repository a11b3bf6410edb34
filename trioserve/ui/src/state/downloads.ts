// Models that are coming from the hub: how fast, and what is said at the end.

import { computed, effect, signal, type ReadonlySignal } from "@preact/signals";

import { models } from "./models";
import { place } from "./storage";

/** Milliseconds that the speed is taken from. */
const WINDOW = 10_000;

export interface Coming {
  id: string;
  done: number;
  total: number;
  /** Bytes a second; 0: not known yet. */
  speed: number;
  /** It was stopped here, and can be continued. */
  paused: boolean;
}

const samples = new Map<string, { at: number; done: number }[]>();
const held = signal<readonly string[]>(kept());

/** The downloads that run, and those that were paused in this browser. */
export const coming: ReadonlySignal<Coming[]> = computed(() => {
  const all = models.value;
  const running = all.flatMap(({ id, bytes }) => (bytes ? [{ id, ...bytes, speed: speedOf(id, bytes.done), paused: false }] : []));
  const names = new Set(all.map(({ id }) => id));
  const paused = held.value.filter((id) => !names.has(id)).map((id) => ({ id, done: 0, total: 0, speed: 0, paused: true }));
  return [...running, ...paused];
});

/** Remember that a download is to be continued, or no longer. */
export function hold(id: string, isHeld: boolean): void {
  held.value = [...held.peek().filter((one) => one !== id), ...(isHeld ? [id] : [])];
  try {
    localStorage.setItem(place("paused"), JSON.stringify(held.peek()));
  } catch {
    // Storage is blocked or full: it is remembered as long as the page lives.
  }
}

/** Call back with each model whose download is complete. */
export function afterDownloads(tell: (id: string) => void): void {
  let before = new Set<string>();
  effect(() => {
    const now = new Set(models.value.filter(({ bytes }) => bytes).map(({ id }) => id));
    for (const id of before) {
      if (now.has(id)) continue;
      samples.delete(id);
      if (models.value.some((one) => one.id === id)) tell(id);
    }
    before = now;
  });
}

function speedOf(id: string, done: number, now = Date.now()): number {
  const list = samples.get(id) ?? [];
  if (list.at(-1)?.done !== done) list.push({ at: now, done });
  while (list.length > 2 && now - list[0]!.at > WINDOW) list.shift();
  samples.set(id, list);
  const [first] = list;
  return first && now > first.at ? ((done - first.done) / (now - first.at)) * 1000 : 0;
}

function kept(): string[] {
  try {
    const given: unknown = JSON.parse(localStorage.getItem(place("paused")) ?? "[]");
    return Array.isArray(given) ? given.filter((one) => typeof one === "string") : [];
  } catch {
    return [];
  }
}
