// Looks for words in the chats.

import type { Chat, Message } from "../types";
import { reading } from "./db";
import { chats } from "./shown";

/** A place where the words occur, with what is around it. */
export interface Hit {
  message: string;
  before: string;
  found: string;
  after: string;
}

export interface Found {
  chat: Chat;
  /** The number of times that the words occur in its messages. */
  count: number;
  /** The first of these places. */
  hits: Hit[];
}

/** Messages that are looked through at once. */
const AT_ONCE = 500;

/** Places of a chat that are shown, and the characters around each. */
const SHOWN = 3;
const BEFORE = 24;
const AFTER = 80;

/** The chats in whose title or messages the text occurs, in the order of the list. */
export async function search(text: string): Promise<Found[]> {
  const wanted = folded(text.trim());
  if (!wanted) return chats.peek().map((chat) => ({ chat, count: 0, hits: [] }));
  const found = new Map<string, { count: number; hits: { at: number; hit: Hit }[] }>();
  const look = (message: Message) => {
    for (const one of [message.content, ...message.attachments.map((file) => file.name)]) {
      const places = placesIn(folded(one), wanted);
      if (places.length === 0) continue;
      const of = found.get(message.chat) ?? { count: 0, hits: [] };
      of.count += places.length;
      const hit = hitAt(one, places[0]!, wanted.length, message.id);
      const at = message.createdAt + (message.role === "user" ? 0 : 0.5); // an answer may come within the same millisecond
      of.hits = [...of.hits, { at, hit }].sort((a, b) => a.at - b.at).slice(0, SHOWN);
      found.set(message.chat, of);
    }
  };
  for (let after = "", more = true; more; ) {
    const some = await reading((tx) => tx.messagesAfter(after, AT_ONCE));
    some.forEach(look);
    after = some[some.length - 1]?.id ?? "";
    more = some.length === AT_ONCE;
  }
  return chats.peek()
    .filter(({ id, title }) => found.has(id) || folded(title).includes(wanted))
    .map((chat) => {
      const { count, hits } = found.get(chat.id) ?? { count: 0, hits: [] };
      return { chat, count, hits: hits.map(({ hit }) => hit) };
    });
}

/** A text in which case does not matter. A few letters get longer in it: then it stays as it is, so that places fit. */
function folded(text: string): string {
  const lower = text.toLowerCase();
  return lower.length === text.length ? lower : text;
}

function placesIn(text: string, wanted: string): number[] {
  const places: number[] = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) places.push(at);
  return places;
}

function hitAt(text: string, at: number, length: number, message: string): Hit {
  const line = (part: string) => part.replace(/\s+/g, " ");
  const from = Math.max(0, at - BEFORE);
  const end = at + length;
  return {
    message,
    before: (from > 0 ? "…" : "") + line(text.slice(from, at)),
    found: line(text.slice(at, end)),
    after: line(text.slice(end, end + AFTER)),
  };
}
