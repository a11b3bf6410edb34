// The chats, and the one that is open.

import { signal, type ReadonlySignal } from "@preact/signals";

import type { Chat, Message } from "../types";

/** The open chat: `path` goes from the first message to the leaf. */
export interface OpenChat {
  chat: Chat;
  path: Message[];
  /** For each message of the path that has siblings: all of them, oldest first, and which it is. */
  branches: Map<string, { index: number; ids: string[] }>;
}

/** All chats, the newest first. */
export const chats: ReadonlySignal<Chat[]> = signal([]);

/** The chat on the screen; null until the page has started. One that has no messages yet is not in `chats`. */
export const openChat: ReadonlySignal<OpenChat | null> = signal(null);

/** A message while it is written: it changes at most once a frame. Undefined: it is not being written, and what `openChat` has is all. */
export function live(_message: string): ReadonlySignal<Message> | undefined {
  throw new Error("not yet");
}

/** Open a chat without messages. It is kept from its first message on. */
export function newChat(): void {
  throw new Error("not yet");
}

/** Open a chat; false: there is none of that id. */
export async function open(_id: string): Promise<boolean> {
  throw new Error("not yet");
}

export async function rename(_id: string, _title: string): Promise<void> {
  throw new Error("not yet");
}

/** Change what a chat asks of the server; an empty value means the settings' own. */
export async function setChat(
  _id: string,
  _change: Partial<Pick<Chat, "system" | "sampling" | "model">>,
): Promise<void> {
  throw new Error("not yet");
}

/** Delete a chat, and stop its answer. What it returns brings the chat back. */
export async function remove(_id: string): Promise<() => Promise<void>> {
  throw new Error("not yet");
}

/** The chats in whose title or messages the text occurs, the newest first. */
export async function search(_text: string): Promise<Chat[]> {
  throw new Error("not yet");
}

/** Write chats as JSON; all of them, or those of the given ids. */
export async function exportChats(_ids?: string[]): Promise<Blob> {
  throw new Error("not yet");
}

/** Add the chats of a file, but for those that are here already; how many were added. Throws an Error for people. */
export async function importChats(_file: Blob): Promise<number> {
  throw new Error("not yet");
}
