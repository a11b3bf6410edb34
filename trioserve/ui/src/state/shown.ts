// The chats in memory: the list of all, and the messages of the one that is open. What changes
// them goes through here, to the database and to the screen.

import { batch, signal, type ReadonlySignal, type Signal } from "@preact/signals";

import type { Chat, Message } from "../types";
import { t } from "../words";
import { reading, writing } from "./db";
import { tellChanged } from "./tabs";
import { branchesOf, pathTo, treeOf, type Branches } from "./tree";

/** The open chat: `path` goes from the first message to the leaf. */
export interface OpenChat {
  chat: Chat;
  path: Message[];
  /** For each message of the path that has siblings: all of them, oldest first, and which it is. */
  branches: Branches;
}

export const chats = signal<Chat[]>([]);
export const openChat = signal<OpenChat | null>(null);

/** The messages of the open chat, on all branches. */
let tree = new Map<string, Message>();

/** Messages while they are written. */
const lives = new Map<string, Signal<Message>>();

/** Counts the calls that open a chat; the last one wins. */
let openings = 0;

/** Counts the changes that are made here. */
let changes = 0;

export function openTree(): ReadonlyMap<string, Message> {
  return tree;
}

export function live(message: string): ReadonlySignal<Message> | undefined {
  return lives.get(message);
}

/** Read the list of chats. */
export async function loadChats(): Promise<void> {
  const found = await reading((tx) => tx.chats());
  chats.value = found.sort(byPlace);
}

/** Put a chat on the screen that is not in the database yet. */
export function showNew(chat: Chat): void {
  openings += 1;
  tree = new Map();
  show(chat);
}

/** Put a chat on the screen; false: no chat has that id. */
export async function showKept(id: string): Promise<boolean> {
  const turn = ++openings;
  const [chat, messages] = await reading(async (tx) => {
    return [await tx.chat(id), await tx.messagesOf(id)] as const;
  });
  if (!chat) return false;
  if (turn !== openings) return true; // another one was opened meanwhile
  tree = treeOf(messages.map((message) => lives.get(message.id)?.peek() ?? message));
  show(chat);
  return true;
}

function show(chat: Chat): void {
  const path = pathTo(tree, chat.leaf);
  openChat.value = { chat, path, branches: branchesOf(tree, path) };
}

/** Find a chat, also one that is not kept yet. */
export function chatOf(id: string): Chat | undefined {
  const shown = openChat.peek()?.chat;
  return shown?.id === id ? shown : chats.peek().find((chat) => chat.id === id);
}

/** Change a chat: add or replace some messages, delete others. */
export async function change(
  id: string,
  how: Partial<Chat>,
  messages: Message[] = [],
  gone: string[] = [],
): Promise<void> {
  const before = chatOf(id);
  if (!before) return;
  changes += 1;
  const isNew = !chats.peek().some((chat) => chat.id === id);
  const isToKeep = !isNew || messages.length > 0;
  if (openChat.peek()?.chat.id === id) {
    for (const one of gone) tree.delete(one);
    for (const message of messages) tree.set(message.id, message);
  }
  showChange({ ...before, ...how }, isToKeep);
  if (!isToKeep) return;
  await writing(async (tx) => {
    // Another tab may have changed other things of it, or deleted it.
    const kept = (await tx.chat(id)) ?? (isNew ? before : undefined);
    if (!kept) return;
    await tx.putChat({ ...kept, ...how });
    for (const message of messages) await tx.putMessage(message);
    for (const one of gone) await tx.deleteMessage(one);
  });
  tellChanged(id);
}

/** Throw an Error for people if another tab has gone on with a chat that is open, and show how. */
export async function checkIsCurrent(id: string): Promise<void> {
  const shown = openChat.peek()?.chat;
  if (shown?.id !== id) return;
  const kept = await writing((tx) => tx.chat(id)); // after what this tab is writing
  if (!kept || kept.leaf === shown.leaf) return;
  await refresh(id);
  throw new Error(t("This chat has gone on in another tab. Look at what is new, and try again."));
}

function showChange(chat: Chat, isKept: boolean): void {
  batch(() => {
    const others = chats.peek().filter((one) => one.id !== chat.id);
    if (isKept) chats.value = [chat, ...others].sort(byPlace);
    if (openChat.peek()?.chat.id === chat.id) show(chat);
  });
}

/** Take a chat from the list, and from the screen unless another is there. */
export function hide(id: string): void {
  chats.value = chats.peek().filter((chat) => chat.id !== id);
  if (openChat.peek()?.chat.id === id) openChat.value = null;
}

/** Show a message as far as it is written. */
export function showLive(message: Message): void {
  const signalOf = lives.get(message.id);
  if (signalOf) {
    signalOf.value = message;
    return;
  }
  lives.set(message.id, signal(message));
  // Another object, so that who has drawn the message looks again, and finds that it is live.
  showMessage({ ...message });
}

/** Show a message that is no longer written. */
export function endLive(message: Message): void {
  batch(() => {
    const signalOf = lives.get(message.id);
    if (signalOf) signalOf.value = message;
    lives.delete(message.id);
    showMessage(message);
  });
}

function showMessage(message: Message): void {
  const shown = openChat.peek();
  if (shown?.chat.id !== message.chat || !tree.has(message.id)) return;
  tree.set(message.id, message);
  show(shown.chat);
}

/**
 * Read a chat again that another tab has changed. Messages that are the same stay the same
 * objects.
 */
export async function refresh(id: string): Promise<void> {
  const isOpen = openChat.peek()?.chat.id === id;
  const turn = openings;
  const changesBefore = changes;
  const [chat, messages] = await reading(async (tx) => {
    return [await tx.chat(id), isOpen ? await tx.messagesOf(id) : []] as const;
  });
  if (changes !== changesBefore) return refresh(id); // what was read may be older than that
  if (!chat) {
    if (chats.peek().some((one) => one.id === id)) hide(id);
    return;
  }
  batch(() => {
    chats.value = [chat, ...chats.peek().filter((one) => one.id !== id)].sort(byPlace);
    if (!isOpen || turn !== openings) return;
    const known = tree;
    tree = treeOf(messages.map((message) => current(message, known.get(message.id))));
    show(chat);
  });
}

function current(read: Message, known: Message | undefined): Message {
  const written = lives.get(read.id)?.peek();
  if (written) return written;
  const isSame =
    known !== undefined &&
    known.state === read.state &&
    known.content === read.content &&
    known.reasoning === read.reasoning &&
    known.error === read.error;
  return isSame ? known : read;
}

function byPlace(a: Chat, b: Chat): number {
  return Number(b.pinned ?? false) - Number(a.pinned ?? false) || b.updatedAt - a.updatedAt || (a.id < b.id ? -1 : 1);
}
