// The server's properties, and its health.

import { computed, effect, signal, type ReadonlySignal } from "@preact/signals";

import { request, requestJson, ServerError } from "../server/api";
import { pauseFor, wake } from "../server/wake";
import { Watch } from "../server/watch";
import type { MediaKind, Model, Props, ServerState, ServerStatus } from "../types";
import { t } from "../words";
import { chosenModel } from "./choice";
import { isRecord } from "./json";
import { isBusy, models as allModels, readModels } from "./models";
import { settings, useServerDefaults } from "./settings";
import { readTools, serverTools } from "./tools";

export { activity, watchActivity } from "./activity";

const status = signal<ServerStatus>({ state: "connecting", message: "" });
const properties = signal<Props | null>(null);

export const server: ReadonlySignal<ServerStatus> = status;

/**
 * Of the chosen model, where it is loaded; of a router, if it is not. Null until the server has
 * said.
 */
export const props: ReadonlySignal<Props | null> = properties;

export const models: ReadonlySignal<Model[]> = allModels;

/** True if the server passes on requests of the page to MCP servers. */
export const hasProxy: ReadonlySignal<boolean> = computed(() => properties.value?.cors_proxy_enabled === true);

/** True if the model takes such files; undefined: the server has not said, or the model is not loaded. */
export function takes(kind: MediaKind): boolean | undefined {
  return properties.value?.modalities?.[kind === "image" ? "vision" : kind];
}

/** Milliseconds to the next look, by what the last one found. */
const PAUSES: Record<ServerState, number> = {
  connecting: 1_000,
  loading: 1_000,
  ready: 5_000,
  sleeping: 5_000,
  draining: 2_000,
  full: 5_000,
  "needs-key": 60_000,
  unreachable: 3_000,
};
const UNSEEN_PAUSE = 60_000;
/** While the progress of a model is to be seen. */
const BUSY_PAUSE = 1_000;

/** Milliseconds that a look may take. */
const PATIENCE = 15_000;

/** Milliseconds after which the server's properties are read again. */
const FRESH = 60_000;

let learntAt = -Infinity;
let hurry = new AbortController();

/** Begin to watch the server, for as long as the page lives. */
export function startServer(): void {
  let asked: string | null = null;
  effect(() => {
    const model = allModels.value.find(({ id }) => id === chosenModel.value);
    const now = JSON.stringify([settings.value.apiKey, model?.id, model?.status]);
    if (asked !== null && asked !== now) retryNow();
    asked = now;
  });
  void keepLooking();
}

/** Check now, and read all properties again. */
export function retryNow(): void {
  learntAt = -Infinity;
  hurry.abort();
}

/**
 * Something has not worked. Whether that is the server's state, the next look tells; that it is
 * full, only this does.
 */
export function noteTrouble(error: ServerError, retryAt: number): void {
  if (error.reason === "full") set("full", t("The server is full."), retryAt);
  else if (error.reason === "key") setBy(error);
  else retryNow();
}

/** Wait until the server has said what it is, or cannot be asked. */
export async function whenKnown(): Promise<void> {
  let stop: (() => void) | undefined;
  await new Promise<void>((resolve) => {
    stop = effect(() => {
      if (status.value.state !== "connecting") resolve();
    });
  });
  stop?.();
}

/** Something has worked. */
export function noteWorks(): void {
  const { state } = status.peek();
  if (state === "full") set("ready", "");
  else if (state !== "ready") retryNow(); // it was asleep, or is back
}

/** Tokens that a chat with a model may have; 0: not known. */
export function contextSizeOf(model: string): number {
  const known = allModels.peek().find(({ id, aliases }) => id === model || aliases.includes(model));
  const ofChosen = properties.peek()?.default_generation_settings.n_ctx ?? 0;
  return known?.contextSize || ofChosen;
}

/** A model answers: a router may know more of it than when it was asked last. */
export function noteAnswer(model: string): void {
  if (!contextSizeOf(model)) retryNow();
}

async function keepLooking(): Promise<never> {
  for (;;) {
    await look();
    const { state } = status.peek();
    const pause = document.hidden ? UNSEEN_PAUSE : isBusy() ? BUSY_PAUSE : PAUSES[state];
    await pauseFor(pause, hurry.signal).catch(() => undefined); // a caller of `refresh` does not want to wait
  }
}

/** Ask the server how it is, and what it is unless we know. */
export async function look(now = Date.now()): Promise<void> {
  hurry = new AbortController();
  const { signal: outer } = hurry;
  const watch = new Watch(outer);
  const { signal } = watch;
  watch.expect(PATIENCE);
  try {
    await request("health", { signal }); // the other routes also answer while it drains
    if (now - learntAt >= FRESH) {
      await learn(signal);
      learntAt = now;
    } else {
      if (properties.peek()?.role === "router") await readModels();
      // MCP servers take a while to say what they have.
      if (properties.peek()?.endpoint_tools && !serverTools.peek()?.length) await learnTools(true, signal);
    }
    const { state, retryAt = 0 } = status.peek();
    if (state === "full" && retryAt > now) return;
    if (properties.peek()?.is_sleeping) set("sleeping", t(SLEEPING));
    else set("ready", "");
  } catch (error) {
    if (outer.aborted) return;
    learntAt = -Infinity;
    setBy(signal.aborted ? new ServerError(t("The server does not answer.")) : error);
  } finally {
    watch.end();
  }
}

const SLEEPING = "The model is asleep. Your next message wakes it.";

async function learn(signal: AbortSignal): Promise<void> {
  const own = await requestJson<Props>("props", { signal });
  await readModels();
  await learnTools(own.endpoint_tools === true, signal);
  const of = own.role === "router" ? await modelProps(signal) : null;
  // These are up to the router, not to its model.
  const { role, cors_proxy_enabled, priority_order } = own;
  const next = of ? { ...of, role, cors_proxy_enabled, priority_order } : own;
  if (JSON.stringify(next) !== JSON.stringify(properties.peek())) properties.value = next;
  if (isRecord(own.ui_settings)) useServerDefaults(own.ui_settings);
}

async function learnTools(hasSome: boolean, signal: AbortSignal): Promise<void> {
  try {
    await readTools(hasSome, { signal });
  } catch (error) {
    const isOfTools = error instanceof ServerError && !error.passes && error.reason !== "key";
    if (!isOfTools) throw error;
    console.warn("The server does not list its tools:", error); // chats work without them
  }
}

/** The properties of a router's model, unless it would have to be loaded for them. */
async function modelProps(signal: AbortSignal): Promise<Props | null> {
  const name = chosenModel.peek();
  if (!allModels.peek().some(({ id, status: its }) => id === name && its === "loaded")) return null;
  try {
    const query = `model=${encodeURIComponent(name)}&autoload=false`;
    return await requestJson<Props>(`props?${query}`, { signal });
  } catch (error) {
    if (error instanceof ServerError && error.status > 0) return null; // unloaded meanwhile
    throw error;
  }
}

function setBy(error: unknown): void {
  if (!(error instanceof ServerError)) throw error;
  switch (error.reason) {
    case "key":
      return set("needs-key", t(settings.peek().apiKey ? WRONG_KEY : NO_KEY));
    case "loading":
      return set("loading", t("The server is loading its model."));
    case "closing":
      return set("draining", t("The server is shutting down. It takes no new messages."));
    case "full":
      return set("full", t("The server is full."), Date.now() + (error.retryAfter ?? PAUSES.full));
    default:
      return set("unreachable", error.message);
  }
}

const NO_KEY = "This server requires an API key.";
const WRONG_KEY = "The server does not know this API key.";

function set(state: ServerState, message: string, retryAt?: number): void {
  const next = retryAt === undefined ? { state, message } : { state, message, retryAt };
  const before = status.peek();
  if (JSON.stringify(next) === JSON.stringify(before)) return;
  status.value = next;
  if (before.state === "unreachable" || before.state === "loading") wake(); // waits may end
}
