// The answers that are being written: those that this tab follows, and those that another tab does.

import { signal } from "@preact/signals";

import { stopStream } from "../server/follow";
import { onWake } from "../server/wake";
import type { Message, Run } from "../types";
import { keepAnswer, reading } from "./db";
import { endLive, refresh, showLive } from "./shown";
import { isFollowedElsewhere, tellChanged, tellRun } from "./tabs";
import { Writer, type Body, type Unwritten } from "./writer";

/** By the id of the chat. */
export const runs = signal<ReadonlyMap<string, Run>>(new Map());

/** By the id of the message. */
const writers = new Map<string, Writer>();

/** Answers that another tab follows, and when there was last a sign of it. */
const others = new Map<string, { message: Unwritten; seenAt: number }>();

/**
 * Milliseconds without a sign after which another tab is asked whether it still follows an answer.
 */
const TRUST = 5_000;

export function isFollowing(message: string): boolean {
  return writers.has(message);
}

export function runOf(message: string): Run | undefined {
  return [...runs.peek().values()].find((run) => run.message === message);
}

/**
 * Have an answer written: ask for it with what `body` makes, or take up one that the server should be
 * writing.
 */
export async function write(message: Unwritten, body?: Body): Promise<void> {
  const writer = new Writer(message, (run) => {
    if (setRun(message, run) && run) tellRun(run);
  });
  writers.set(message.id, writer);
  try {
    await writer.run(body);
  } finally {
    if (writers.get(message.id) === writer) writers.delete(message.id); // else it is continued
  }
  const ended = await reading((tx) => tx.message(message.id));
  if (ended && ended.state !== "writing") for (const listen of listeners) await listen(ended);
}

const listeners: ((message: Message) => Promise<void>)[] = [];

/** Call back after each answer that this tab has followed to its end. */
export function afterAnswers(listen: (message: Message) => Promise<void>): void {
  listeners.push(listen);
}

/** End the answers that a chat is being given, whichever tab follows them. */
export async function stopRuns(chat: string): Promise<void> {
  const own = [...writers.values()].filter((writer) => writer.chat === chat);
  const theirs = [...others.values()].filter(({ message }) => message.chat === chat);
  await Promise.all([
    ...own.map((writer) => writer.stop()),
    ...theirs.map(({ message }) => stopElsewhere(message)),
  ]);
}

async function stopElsewhere(message: Unwritten): Promise<void> {
  void stopStream(message.stream.conversation);
  const now = await reading((tx) => tx.message(message.id));
  if (now?.state !== "writing") return;
  const { stream: _, ...stopped } = { ...now, state: "stopped" as const };
  await keepAnswer(stopped, message.stream.conversation);
  tellChanged(message.chat);
  await look();
}

/**
 * Take up the answers that the database has as unfinished, unless another tab follows them. Called
 * at the start, and when another tab has changed something.
 */
export async function look(): Promise<void> {
  const found = (await reading((tx) => tx.writing())).filter(isUnwritten);
  const ids = new Set(found.map((message) => message.id));
  for (const [id, { message }] of others) {
    if (!ids.has(id)) await end(message);
  }
  const foreign = found.filter(({ id }) => !writers.has(id));
  for (const message of foreign) if (others.has(message.id)) follow(message);
  await Promise.all(foreign.filter(({ id }) => !others.has(id)).map(claim));
}

/** Look whether the tabs that follow the other answers are still there. */
export async function checkOthers(patience = TRUST): Promise<void> {
  const old = [...others.values()].filter(({ seenAt }) => Date.now() - seenAt >= patience);
  await Promise.all(old.map(({ message }) => claim(message)));
}

/** Check now and then, and when the person comes back. */
export function startChecking(): void {
  setInterval(() => void checkOthers(), TRUST);
  onWake(() => void checkOthers());
}

/** Follow an answer ourselves, or leave it to the tab that does. */
async function claim(message: Unwritten): Promise<void> {
  if (await isFollowedElsewhere(message.id)) {
    follow(message);
    return;
  }
  others.delete(message.id);
  const now = await reading((tx) => tx.message(message.id));
  if (writers.has(message.id)) return; // two have asked at the same time
  if (now && isUnwritten(now)) void write(now);
  else await end(message);
}

/** Show what another tab has saved of an answer. */
function follow(message: Unwritten): void {
  others.set(message.id, { message, seenAt: Date.now() });
  showLive(message);
  const { chat, id, stream, content } = message;
  if (runs.peek().get(chat)?.message === id) return; // that tab tells more
  const phase = content ? "writing" : "sending";
  setRun(message, { chat, message: id, startedAt: stream.startedAt, phase });
}

/** Show how another tab says that an answer goes. */
export function showRun(run: Run): void {
  const other = others.get(run.message);
  if (!other) return;
  other.seenAt = Date.now();
  setRun(other.message, run);
}

/** Show how an answer has ended that another tab followed. */
async function end(message: Unwritten): Promise<void> {
  others.delete(message.id);
  const now = await reading((tx) => tx.message(message.id));
  endLive(now ?? { ...message, state: "stopped" });
  await refresh(message.chat);
  setRun(message, null);
}

function isUnwritten(message: Message): message is Unwritten {
  return message.state === "writing" && message.stream !== undefined;
}

/** Show how an answer goes; null: it has ended. False: that is nothing new. */
function setRun(message: Message, run: Run | null): boolean {
  const before = runs.peek().get(message.chat);
  if (run === null && before?.message !== message.id) return false;
  if (run && JSON.stringify(run) === JSON.stringify(before)) return false;
  const next = new Map(runs.peek());
  if (run) next.set(message.chat, run);
  else next.delete(message.chat);
  runs.value = next;
  return true;
}
