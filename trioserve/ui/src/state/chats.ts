// The chats, and the one that is open.

import type { ReadonlySignal } from "@preact/signals";

import type { Chat, Message } from "../types";
import { t } from "../words";
import { reading, writing } from "./db";
import { newId } from "./ids";
import { stopRuns } from "./runs";
import * as shown from "./shown";
import { tellChanged } from "./tabs";
import { pathTo, treeOf } from "./tree";

export { search, type Found, type Hit } from "./search";
export { live, type OpenChat } from "./shown";

/** All chats, the newest first. */
export const chats: ReadonlySignal<Chat[]> = shown.chats;

/**
 * The chat on the screen; null until the page has started. One that has no messages yet is not in
 * `chats`.
 */
export const openChat: ReadonlySignal<shown.OpenChat | null> = shown.openChat;

/** Open a chat without messages. It is kept from its first message on. */
export function newChat(): void {
  const now = Date.now();
  shown.showNew({
    id: newId(),
    title: "",
    createdAt: now,
    updatedAt: now,
    leaf: null,
    system: "",
    sampling: {},
    model: "",
  });
}

/** Open a chat; false: no chat has that id. */
export async function open(id: string): Promise<boolean> {
  return shown.showKept(id);
}

export async function rename(id: string, title: string): Promise<void> {
  const words = title.trim();
  if (words) await shown.change(id, { title: words, untitled: undefined });
}

/** Change what a chat asks of the server; an empty value means the settings' own. */
export async function setChat(
  id: string,
  change: Partial<Pick<Chat, "system" | "sampling" | "model">>,
): Promise<void> {
  await shown.change(id, change);
}

/** Delete a chat, and stop its answer. What it returns brings the chat back. */
export async function remove(id: string): Promise<() => Promise<void>> {
  await stopRuns(id);
  const wasOpen = openChat.peek()?.chat.id === id;
  const chat = shown.chatOf(id);
  const messages = await reading((tx) => tx.messagesOf(id));
  shown.hide(id);
  if (wasOpen) newChat();
  await writing(async (tx) => {
    await tx.deleteChat(id);
    for (const message of messages) await tx.deleteMessage(message.id);
  });
  tellChanged(id);
  return async () => {
    if (!chat) return;
    await keep([{ chat, messages }]);
    if (wasOpen) await open(id);
  };
}

/** Keep a chat at the top of the list, or no longer. */
export async function pin(id: string, pinned: boolean): Promise<void> {
  await shown.change(id, { pinned: pinned || undefined });
}

/** Copy a chat with all its branches; the id of the copy. An answer that is being written ends there. */
export async function duplicate(id: string): Promise<string> {
  const chat = shown.chatOf(id);
  if (!chat) throw new Error(t("This chat is no longer there."));
  const messages = await reading((tx) => tx.messagesOf(id));
  const ids = new Map<string | null, string | null>([[null, null], ...messages.map((one) => [one.id, newId()] as const)]);
  const copy: Chat = {
    ...chat,
    id: newId(),
    title: t("{title} (copy)", { title: chat.title }),
    updatedAt: Date.now(),
    leaf: ids.get(chat.leaf) ?? null,
    pinned: undefined,
    untitled: undefined,
    start: chat.start && { ...chat.start, message: ids.get(chat.start.message) ?? "" },
  };
  const copies = messages.map(({ stream: _, ...one }): Message => ({
    ...one,
    id: ids.get(one.id)!,
    chat: copy.id,
    parent: ids.get(one.parent) ?? null,
    state: one.state === "writing" ? "stopped" : one.state,
  }));
  await keep([{ chat: copy, messages: copies }]);
  return copy.id;
}

/** Write chats as JSON; all of them, or those of the given ids. */
export async function exportChats(ids?: string[]): Promise<Blob> {
  const wanted = chats.peek().filter(({ id }) => !ids || ids.includes(id));
  const wholes = await reading((tx) =>
    Promise.all(wanted.map(async (chat) => ({ chat, messages: await tx.messagesOf(chat.id) }))),
  );
  return (await import("./transfer")).written(wholes);
}

/** Write the branch of a chat that is shown as Markdown. */
export async function exportMarkdown(id: string): Promise<Blob> {
  const chat = shown.chatOf(id);
  if (!chat) throw new Error(t("This chat is no longer there."));
  const messages = await reading((tx) => tx.messagesOf(id));
  const { asMarkdown } = await import("./markdown");
  return new Blob([asMarkdown(chat, pathTo(treeOf(messages), chat.leaf))], { type: "text/markdown" });
}

/**
 * Add the chats of a file, but for those that are here already; how many were added. Throws an
 * Error for people.
 */
export async function importChats(file: Blob): Promise<number> {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const { textsOf, read } = await import("./transfer");
  const wholes = (await textsOf(bytes)).flatMap(read);
  const known = new Set(chats.peek().map(({ id }) => id));
  const added = wholes.filter(({ chat }) => !known.has(chat.id) && known.add(chat.id));
  if (added.length > 0 && !(await keep(added, true))) {
    throw new Error(t("The chats could not be added: the browser’s storage is full or blocked."));
  }
  return added.length;
}

/** Put whole chats into the database; false: they could not be kept. */
async function keep(
  wholes: { chat: Chat; messages: Message[] }[],
  isOptional = false,
): Promise<boolean> {
  const done = await writing(async (tx) => {
    for (const { chat, messages } of wholes) {
      await tx.putChat(chat);
      for (const message of messages) await tx.putMessage(message);
    }
    return true;
  }, isOptional);
  await shown.loadChats();
  for (const { chat } of wholes) tellChanged(chat.id);
  return done === true;
}
