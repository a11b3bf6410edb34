// Data that could not be kept because storage is full. It is shown from here, and kept once there is room.

import type { Chat, Message, Transaction } from "../types";

const chats = new Map<string, Chat>();
const messages = new Map<string, Message>();

/** The writes of one transaction. */
export class Changes {
  readonly chats = new Map<string, Chat | null>();
  readonly messages = new Map<string, Message | null>();
  /** Why the transaction has failed. The rest of it is still recorded. */
  failure: unknown = null;

  async attempt(put: Promise<unknown>): Promise<void> {
    try {
      await put;
    } catch (error) {
      this.failure ??= error;
    }
  }

  /** They are in the database. */
  wereKept(): void {
    for (const id of this.chats.keys()) chats.delete(id);
    for (const id of this.messages.keys()) messages.delete(id);
  }

  /** They are not: hold them here. What was to be deleted stays. */
  wereNotKept(): void {
    for (const [id, chat] of this.chats) if (chat) chats.set(id, chat);
    for (const [id, message] of this.messages) if (message) messages.set(id, message);
  }
}

export function hasUnkept(): boolean {
  return chats.size > 0 || messages.size > 0;
}

/** Write all of it. */
export async function writeUnkept(tx: Transaction): Promise<void> {
  for (const chat of [...chats.values()]) await tx.putChat(chat);
  for (const message of [...messages.values()]) await tx.putMessage(message);
}

/** A transaction that also sees what is held here, and notes what it is to write. */
export function overlaid(tx: Transaction, changes: Changes): Transaction {
  const merged = (found: Message[], fits: (message: Message) => boolean) => [
    ...found.filter(({ id }) => !messages.has(id)),
    ...[...messages.values()].filter(fits),
  ];
  return {
    chats: async () => [
      ...(await tx.chats()).filter(({ id }) => !chats.has(id)),
      ...chats.values(),
    ],
    chat: async (id) => chats.get(id) ?? tx.chat(id),
    message: async (id) => messages.get(id) ?? tx.message(id),
    messagesOf: async (chat) =>
      merged(await tx.messagesOf(chat), (message) => message.chat === chat),
    messagesAfter: (after, count) => tx.messagesAfter(after, count),
    writing: async () =>
      merged(await tx.writing(), (message) => message.state === "writing"),
    putChat(chat) {
      changes.chats.set(chat.id, chat);
      return changes.attempt(tx.putChat(chat));
    },
    putMessage(message) {
      changes.messages.set(message.id, message);
      return changes.attempt(tx.putMessage(message));
    },
    deleteChat(id) {
      changes.chats.set(id, null);
      return tx.deleteChat(id);
    },
    deleteMessage(id) {
      changes.messages.set(id, null);
      return tx.deleteMessage(id);
    },
  };
}
