// The browser's database; or memory, where the browser does not let us have one.

import { openDB, type DBSchema, type IDBPDatabase } from "idb";

import type { Chat, Message, Transaction } from "../types";
import { noteBlocked, noteKept, noteUnkept, place } from "./storage";
import { Changes, hasUnkept, overlaid, writeUnkept } from "./unkept";

export { storage } from "./storage";

interface Schema extends DBSchema {
  chats: { key: string; value: Chat };
  messages: {
    key: string;
    value: Message;
    indexes: { chat: string; state: string };
  };
}

/** Milliseconds after which a database that does not open is given up. */
const PATIENCE = 4_000;

let database: Promise<IDBPDatabase<Schema> | Memory> | null = null;

/** Read within one transaction. */
export async function reading<T>(work: (tx: Transaction) => Promise<T>): Promise<T> {
  return transact("readonly", work);
}

/**
 * Change the database within one transaction. Undefined: it could not be kept, and `storage` says
 * why; then the page holds it until there is room, or drops it if it `isOptional`.
 */
export function writing<T>(
  work: (tx: Transaction) => Promise<T>,
  isOptional = false,
): Promise<T | undefined> {
  // One after the other: what cannot be kept has to be held before the next one looks for it.
  const done = lastWrite.then(() => attempt(work, isOptional));
  const next = () => undefined;
  lastWrite = done.then(next, next); // who has called hears of the error
  return done;
}

let lastWrite: Promise<void> = Promise.resolve();

async function attempt<T>(
  work: (tx: Transaction) => Promise<T>,
  isOptional: boolean,
): Promise<T | undefined> {
  const changes = new Changes();
  try {
    const result = await transact("readwrite", work, changes);
    changes.wereKept();
    // Perhaps something was deleted, so that there is room.
    if (hasUnkept()) await attempt(writeUnkept, false);
    else noteKept();
    return result;
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
    if (!isOptional) changes.wereNotKept();
    noteUnkept(error);
    return undefined;
  }
}

async function transact<T>(
  mode: "readonly" | "readwrite",
  work: (tx: Transaction) => Promise<T>,
  changes = new Changes(),
): Promise<T> {
  database ??= connect();
  let opened = await database;
  if (opened instanceof Memory) return work(opened);
  let raw;
  try {
    raw = opened.transaction(["chats", "messages"], mode);
  } catch {
    // The browser has closed the connection, as some do with pages that slept.
    database = connect();
    opened = await database;
    if (opened instanceof Memory) return work(opened);
    raw = opened.transaction(["chats", "messages"], mode);
  }
  const chats = raw.objectStore("chats");
  const messages = raw.objectStore("messages");
  // A transaction that only reads has neither `put` nor `delete`.
  const tx: Transaction = {
    chats: () => chats.getAll(),
    chat: (id) => chats.get(id),
    putChat: async (chat) => chats.put!(chat),
    deleteChat: async (id) => chats.delete!(id),
    message: (id) => messages.get(id),
    messagesOf: (chat) => messages.index("chat").getAll(chat),
    messagesAfter: (after, count) => messages.getAll(IDBKeyRange.lowerBound(after, true), count),
    writing: () => messages.index("state").getAll("writing"),
    putMessage: async (message) => messages.put!(message),
    deleteMessage: async (id) => messages.delete!(id),
  };
  try {
    const result = await work(overlaid(tx, changes));
    if (changes.failure) throw changes.failure;
    await raw.done;
    return result;
  } catch (error) {
    raw.done.catch(() => undefined); // it says the same once more
    try {
      raw.abort();
    } catch {
      // It has ended by itself.
    }
    throw error;
  }
}

async function connect(): Promise<IDBPDatabase<Schema> | Memory> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  try {
    const opening = openDB<Schema>(place("chats"), 1, {
      upgrade(db) {
        db.createObjectStore("chats", { keyPath: "id" });
        const messages = db.createObjectStore("messages", { keyPath: "id" });
        messages.createIndex("chat", "chat");
        messages.createIndex("state", "state");
      },
      blocking(_current, _blocked, event) {
        // Another tab has a newer version of the page: do not block it.
        (event.target as IDBDatabase).close();
        database = null;
      },
      terminated() {
        database = null; // opened again when it is needed
      },
    });
    const tooLong = new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(new Error("The database does not open.")), PATIENCE);
    });
    return await Promise.race([opening, tooLong]);
  } catch {
    noteBlocked();
    return new Memory();
  } finally {
    clearTimeout(timer);
  }
}

/** The same for a window that may keep nothing. */
class Memory implements Transaction {
  readonly #chats = new Map<string, Chat>();
  readonly #messages = new Map<string, Message>();

  #found(fits: (message: Message) => boolean): Message[] {
    return [...this.#messages.values()].filter(fits);
  }

  async chats(): Promise<Chat[]> {
    return [...this.#chats.values()];
  }

  async chat(id: string): Promise<Chat | undefined> {
    return this.#chats.get(id);
  }

  async putChat(chat: Chat): Promise<void> {
    this.#chats.set(chat.id, chat);
  }

  async deleteChat(id: string): Promise<void> {
    this.#chats.delete(id);
  }

  async message(id: string): Promise<Message | undefined> {
    return this.#messages.get(id);
  }

  async messagesOf(chat: string): Promise<Message[]> {
    return this.#found((message) => message.chat === chat);
  }

  async messagesAfter(after: string, count: number): Promise<Message[]> {
    const later = this.#found((message) => message.id > after);
    return later.sort((a, b) => (a.id < b.id ? -1 : 1)).slice(0, count);
  }

  async writing(): Promise<Message[]> {
    return this.#found((message) => message.state === "writing");
  }

  async putMessage(message: Message): Promise<void> {
    this.#messages.set(message.id, message);
  }

  async deleteMessage(id: string): Promise<void> {
    this.#messages.delete(id);
  }
}

/**
 * Keep the received part of an answer, unless the database knows better: another tab may have stopped
 * it, be further with it, or have restarted it. What then counts is returned; null: the answer was
 * deleted.
 */
export async function keepAnswer(message: Message, conversation: string): Promise<Message | null> {
  const kept = await writing(async (tx) => {
    const before = await tx.message(message.id);
    if (!before) return null;
    if (before.state !== "writing" || before.stream?.conversation !== conversation) return before;
    const isBehind = (message.stream?.offset ?? Infinity) < before.stream.offset;
    if (!isBehind) await tx.putMessage(message);
    return message;
  });
  return kept === undefined ? message : kept;
}
