// A live view of what the server does: slots, queue and KV cache.

import { signal, type ReadonlySignal } from "@preact/signals";

import { requestJson, ServerError } from "../server/api";
import type { Activity, QueuedView, SlotView } from "../types";
import { t } from "../words";
import { models } from "./models";

const seen = signal<Activity | null>(null);

export const activity: ReadonlySignal<Activity | null> = seen;

/** Milliseconds between two looks. */
const INTERVAL = 500;

/** The weight of a slot's last speed in the next. */
const SMOOTHING = 0.6;

/** What /slots?queue=1 tells. */
interface Told {
  slots: ToldSlot[];
  queue: ToldPlace[];
  kv_cache?: { cells: number; used: number };
  cache?: { kv_bytes: number; ram_bytes: number; disk_bytes: number; ram_tokens: number; disk_tokens: number };
  totals?: { prompt_tokens: number; cached_tokens: number; generated_tokens: number };
  drafts?: Activity["drafts"];
}

interface ToldPlace {
  id_task: number;
  position: number;
  n_prompt_tokens: number;
  priority: number;
  waited_s: number;
  wait_s: number | null;
}

interface ToldSlot {
  id: number;
  n_ctx: number;
  is_processing: boolean;
  state: SlotView["state"];
  paused: boolean;
  id_task?: number;
  n_prompt_tokens?: number;
  n_prompt_tokens_processed?: number;
  n_prompt_tokens_cache?: number;
  next_token?: { n_decoded?: number }[];
}

/** Of each slot, by model and number: what was seen last. */
const before = new Map<string, { task: number; decoded: number; at: number; speed: number }>();

let watchers = 0;
let timer: ReturnType<typeof setTimeout> | undefined;

/** Keep looking at what the server does, until the function that is returned is called. */
export function watchActivity(): () => void {
  watchers += 1;
  if (watchers === 1) void keepWatching();
  let isOver = false;
  return () => {
    if (isOver) return;
    isOver = true;
    watchers -= 1;
    if (watchers === 0) clearTimeout(timer);
  };
}

async function keepWatching(): Promise<void> {
  if (!document.hidden) await lookAround();
  if (watchers > 0) timer = setTimeout(() => void keepWatching(), INTERVAL);
}

/** Look once. */
export async function lookAround(now = Date.now()): Promise<void> {
  const names = models.peek().filter(({ status }) => status === "loaded").map(({ id }) => id);
  try {
    const told = await Promise.all(names.map(async (name) => [name, await ask(name)] as const));
    seen.value = summed(told, now);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    const why = error.status === OFF ? t("The server does not tell: it runs with --no-slots.") : error.message;
    seen.value = { ...NOTHING, at: now, missing: error.reason === "network" ? [] : [why] }; // the page has a notice of that
  }
}

/** The status where the server runs without /slots. */
const OFF = 501;

const NOTHING: Omit<Activity, "at"> = {
  slots: null,
  queue: null,
  cache: null,
  kept: null,
  totals: null,
  drafts: [],
  tokensPerSecond: 0,
  missing: [],
};

/** A server with one model passes over its name. */
async function ask(model: string): Promise<Told> {
  return requestJson<Told>(`slots?queue=1&model=${encodeURIComponent(model)}&autoload=false`);
}

/** True if a model has more requests than this, running or waiting. A server without figures seems idle. */
export async function isBusy(model: string, most: number): Promise<boolean> {
  try {
    const { slots, queue } = await ask(model);
    return slots.filter((slot) => slot.is_processing).length + queue.length > most;
  } catch (error) {
    if (error instanceof ServerError && error.status === OFF) return false;
    throw error;
  }
}

function summed(told: (readonly [string, Told])[], now: number): Activity {
  const slots = told.flatMap(([model, { slots }]) => slots.map((slot) => slotOf(slot, model, now)));
  const queue = told.flatMap(([model, one]) => one.queue.map((each) => queuedOf(each, model)));
  const caches = told.flatMap(([, one]) => one.kv_cache ?? []);
  const kept = told.flatMap(([, one]) => one.cache ?? []);
  const totals = told.flatMap(([, one]) => one.totals ?? []);
  const ofRam = sum(kept, "ram_tokens");
  const ofDisk = sum(kept, "disk_tokens");
  return {
    at: now,
    slots,
    queue,
    cache: caches.length > 0 ? { used: sum(caches, "used"), total: sum(caches, "cells") } : null,
    kept:
      kept.length > 0
        ? {
            kv: { bytes: sum(kept, "kv_bytes"), found: sum(totals, "cached_tokens") - ofRam - ofDisk },
            ram: { bytes: sum(kept, "ram_bytes"), found: ofRam },
            disk: { bytes: Math.max(...kept.map((one) => one.disk_bytes)), found: ofDisk }, // models share the folder
          }
        : null,
    totals:
      totals.length > 0
        ? {
            promptTokens: sum(totals, "prompt_tokens"),
            cachedTokens: sum(totals, "cached_tokens"),
            tokens: sum(totals, "generated_tokens"),
          }
        : null,
    drafts: byType(told.flatMap(([, one]) => one.drafts ?? [])),
    tokensPerSecond: slots.reduce((all, slot) => all + slot.tokensPerSecond, 0),
    missing: told.length === 0 ? [t("No model is loaded.")] : [],
  };
}

/** Add up what the models say of each type of drafts. */
function byType(all: Activity["drafts"]): Activity["drafts"] {
  return [...new Set(all.map(({ type }) => type))].map((type) => {
    const its = all.filter((one) => one.type === type);
    return { type, tokens: sum(its, "tokens"), accepted: sum(its, "accepted") };
  });
}

function sum<K extends string>(all: Record<K, number>[], name: K): number {
  return all.reduce((total, one) => total + one[name], 0);
}

function slotOf(slot: ToldSlot, model: string, now: number): SlotView {
  const cached = slot.n_prompt_tokens_cache ?? 0;
  const decoded = slot.next_token?.[0]?.n_decoded ?? 0;
  return {
    id: slot.id,
    model,
    state: slot.state,
    paused: slot.paused,
    contextSize: slot.n_ctx,
    promptTokens: slot.n_prompt_tokens ?? 0,
    promptDone: cached + (slot.n_prompt_tokens_processed ?? 0),
    cachedTokens: cached,
    decoded,
    tokensPerSecond: speedOf(slot, `${model} ${slot.id}`, decoded, now),
  };
}

function speedOf(slot: ToldSlot, name: string, decoded: number, now: number): number {
  const task = slot.id_task ?? -1;
  const last = before.get(name);
  const isSame = last !== undefined && last.task === task && slot.is_processing && now > last.at;
  const fresh = isSame ? ((decoded - last.decoded) / (now - last.at)) * 1000 : 0;
  const speed = isSame && last.speed > 0 ? last.speed * SMOOTHING + fresh * (1 - SMOOTHING) : fresh;
  before.set(name, { task, decoded, at: now, speed });
  return speed;
}

function queuedOf(one: ToldPlace, model: string): QueuedView {
  return {
    id: one.id_task,
    model,
    position: one.position,
    promptTokens: one.n_prompt_tokens,
    priority: one.priority,
    waitedS: one.waited_s,
    waitS: one.wait_s,
  };
}
