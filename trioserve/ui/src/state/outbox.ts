// Messages that wait until the answer before them is complete.

import { effect, signal, type ReadonlySignal } from "@preact/signals";

import type { Attachment } from "../types";
import { toolsOf } from "./calls";
import { reading } from "./db";
import { newId } from "./ids";
import { isRecord } from "./json";
import { runs } from "./runs";
import { chatOf } from "./shown";
import { place } from "./storage";
import { send } from "./talk";

export interface Queued {
  id: string;
  text: string;
  attachments: Attachment[];
}

interface Waiting {
  messages: Queued[];
  /** The last answer was stopped or has failed: a person decides. */
  isHeld: boolean;
}

const NONE: Waiting = { messages: [], isHeld: false };

const waiting = signal<ReadonlyMap<string, Waiting>>(new Map());

/** By the id of the chat. */
export const outbox: ReadonlySignal<ReadonlyMap<string, Waiting>> = waiting;

/** Send a message once the answer of its chat is complete. */
export function enqueue(chat: string, text: string, attachments: Attachment[]): void {
  put(chat, { messages: [...of(chat).messages, { id: newId(), text, attachments }] });
}

/** Take a message out again; undefined: it has been sent. */
export function take(chat: string, id: string): Queued | undefined {
  const { messages } = of(chat);
  put(chat, { messages: messages.filter((one) => one.id !== id) });
  return messages.find((one) => one.id === id);
}

/** Send the first message of a chat. It waits again if it cannot be sent. */
export async function sendNext(chat: string): Promise<void> {
  const { messages } = of(chat);
  const [first] = messages;
  if (!first || !chatOf(chat)) return;
  put(chat, { messages: messages.slice(1), isHeld: false });
  try {
    await send(first.text, first.attachments, chat);
  } catch (error) {
    put(chat, { messages: [first, ...of(chat).messages], isHeld: true });
    throw error;
  }
}

/** Send what waits, from now on. What was waiting when the page was reloaded waits for a person. */
export function startOutbox(): void {
  recall();
  let before = runs.peek();
  effect(() => {
    const now = runs.value;
    for (const [chat, { message }] of before) {
      if (!now.has(chat) && of(chat).messages.length > 0) void goOn(chat, message);
    }
    before = now;
  });
  effect(remember);
}

/** An answer has ended: what waits for it is sent, unless something went wrong. */
async function goOn(chat: string, message: string): Promise<void> {
  const ended = await reading((tx) => tx.message(message));
  if (runs.peek().has(chat)) return; // another answer has begun
  if (ended && toolsOf(ended)) return; // its calls come first
  if (ended?.state === "done") await sendNext(chat);
  else put(chat, { isHeld: true });
}

function of(chat: string): Waiting {
  return waiting.peek().get(chat) ?? NONE;
}

function put(chat: string, how: Partial<Waiting>): void {
  const next = new Map(waiting.peek());
  const now = { ...of(chat), ...how };
  if (now.messages.length > 0) next.set(chat, now);
  else next.delete(chat);
  waiting.value = next;
}

/** A reload of the tab keeps the messages; files other than texts are too large for that. */
function remember(): void {
  const kept = [...waiting.value].map(([chat, { messages }]) => [
    chat,
    messages.map((one) => ({ ...one, attachments: one.attachments.filter((file) => !file.data) })),
  ]);
  try {
    sessionStorage.setItem(place("outbox"), JSON.stringify(kept));
  } catch {
    // Storage is blocked or full: the messages are there until the page is reloaded.
  }
}

function recall(): void {
  try {
    const kept: unknown = JSON.parse(sessionStorage.getItem(place("outbox")) ?? "[]");
    if (!Array.isArray(kept)) return;
    const isWhole = (one: unknown): one is Queued => isRecord(one) && typeof one.text === "string" && Array.isArray(one.attachments);
    for (const [chat, messages] of kept as [string, unknown[]][]) put(chat, { messages: messages.filter(isWhole), isHeld: true });
  } catch {
    // As above, or written by something else.
  }
}
