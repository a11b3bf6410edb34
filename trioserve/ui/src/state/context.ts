// A chat that no longer fits into the model's context: what of it the model still gets.

import { signal, type ReadonlySignal } from "@preact/signals";

import { posting, requestJson } from "../server/api";
import type { Chat, Message } from "../types";
import { t } from "../words";
import { modelOf } from "./choice";
import { bodyFor } from "./prompt";
import { change, openChat } from "./shown";
import { lengthOf } from "./steps";

const running = signal<AbortController | null>(null);

/** True while a summary is being written. */
export const isSummarizing: ReadonlySignal<AbortController | null> = running;

/** The part of a path that the model gets, and the summary of the rest. */
export function sentOf(chat: Chat, path: readonly Message[]): { path: readonly Message[]; summary: string } {
  const at = chat.start ? path.findIndex(({ id }) => id === chat.start?.message) : -1;
  return at < 0 ? { path, summary: "" } : { path: path.slice(at), summary: chat.start!.summary };
}

/** The system prompt, followed by the summary of turns that the model no longer gets. */
export function systemWith(system: string, summary: string): string {
  return [system, summary && `Summary of the conversation before this:\n${summary}`].filter(Boolean).join("\n\n");
}

/**
 * The index at which a path begins without its oldest turns: at most half of its text is left, but never less than
 * the last question. 0: it is the only one.
 */
export function cutOf(path: readonly Message[]): number {
  const sizes = path.map(sizeOf);
  const all = sizes.reduce((sum, one) => sum + one, 0);
  let left = all;
  let cut = 0;
  for (const [index, message] of path.entries()) {
    if (index > 0 && message.role === "user") {
      cut = index;
      if (left <= all / 2) break;
    }
    left -= sizes[index]!;
  }
  return cut;
}

function sizeOf({ content, reasoning, attachments, steps }: Message): number {
  const files = attachments.reduce((sum, { text }) => sum + text.length, 0);
  return content.length + reasoning.length + files + lengthOf(steps);
}

/** True if the open chat has turns that can be left out. */
export function canCut(): boolean {
  const open = openChat.value;
  return open !== null && cutOf(sentOf(open.chat, open.path).path) > 0;
}

/** Leave the oldest turns of the open chat out of what the model gets. */
export async function dropOldest(): Promise<void> {
  const { chat, kept } = opened();
  await change(chat.id, { start: { message: kept[0]!.id, summary: "", since: Date.now() } });
}

/** Replace the oldest turns of the open chat by a summary that the model writes. */
export async function summarize(): Promise<void> {
  if (running.peek()) throw new Error(t("A summary is being written already."));
  const { chat, dropped, kept, summary } = opened();
  const abort = new AbortController();
  running.value = abort;
  try {
    const text = await summaryOf(chat, dropped, summary, abort.signal);
    await change(chat.id, { start: { message: kept[0]!.id, summary: text, since: Date.now() } });
  } finally {
    running.value = null;
  }
}

/** Send the whole open chat again. */
export async function sendAll(): Promise<void> {
  const chat = openChat.peek()?.chat;
  if (chat) await change(chat.id, { start: undefined });
}

function opened(): { chat: Chat; dropped: readonly Message[]; kept: readonly Message[]; summary: string } {
  const open = openChat.peek();
  if (!open) throw new Error(t("No chat is open."));
  const { path, summary } = sentOf(open.chat, open.path);
  const cut = cutOf(path);
  if (cut === 0) throw new Error(t("There is no earlier turn to leave out: the last message is too long by itself."));
  return { chat: open.chat, dropped: path.slice(0, cut), kept: path.slice(cut), summary };
}

async function summaryOf(chat: Chat, dropped: readonly Message[], before: string, signal: AbortSignal): Promise<string> {
  const asked = { sampling: {}, model: modelOf(chat), tools: {}, path: dropped, continues: false };
  const { messages, model } = await bodyFor({ ...asked, system: systemWith("", before) });
  const body = { messages, ...(model ? { model } : {}) };
  const given = await requestJson<{ summary: string }>("v1/chat/completions/compact", posting(body, { signal }));
  return given.summary;
}

/** Ask the model something beside the chats; its answer, without its reasoning. */
export async function ask(body: Record<string, unknown>, signal: AbortSignal): Promise<string> {
  const given = await requestJson<{ choices?: { message?: { content?: unknown } }[] }>(
    "v1/chat/completions", posting(body, { signal }),
  );
  const text = given.choices?.[0]?.message?.content;
  return typeof text === "string" ? text.trim() : "";
}
