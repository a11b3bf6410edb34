/** Drafts: text that is not yet sent, for each chat. */

import { computed, effect, signal, untracked, type ReadonlySignal } from "@preact/signals";

import { openChat } from "../state/chats";
import { newId } from "../state/ids";
import { takes } from "../state/server";
import type { Attachment } from "../types";
import { t } from "../words";
import { readAttachment, refusal } from "./attachments";
import { attempt } from "./toasts";
import { recall, remember } from "./view";

export interface Draft {
  text: string;
  attachments: Attachment[];
}

const EMPTY: Draft = { text: "", attachments: [] };

/** By the id of the chat; chats that have no message yet share one. */
const drafts = new Map<string, Draft>();
const NEW = "";
/** The key of a draft that is written before the chats are loaded. */
const EARLY = "early";

const current = signal<Draft>(EMPTY);
let shown = { draft: EARLY, chat: "" };

/** The draft of the open chat. */
export const draft: ReadonlySignal<Draft> = current;

const reading = signal(0);

/** True while files for the next message are being read. */
export const isAttaching = computed(() => reading.value > 0);

/** Change the draft of the open chat. */
export function setDraft(change: Partial<Draft>): void {
  current.value = { ...current.peek(), ...change };
  drafts.set(shown.draft, current.peek());
  if (shown.draft === EARLY) return; // what is kept is not read yet
  const texts = [...drafts].flatMap(([key, { text }]) => (text ? [[key, text]] : []));
  remember("drafts", JSON.stringify(texts), "tab");
}

/**
 * Follow the open chat. The texts that were being written when the page was reloaded are there again, and what has
 * been written since then stands behind.
 */
export function startDrafts(): void {
  for (const [key, text] of kept()) drafts.set(key, { ...EMPTY, text });
  const early = current.peek();
  effect(() => {
    const open = openChat.value;
    const chat = open?.chat.id ?? "";
    const key = open?.path.length ? chat : NEW;
    if (key === shown.draft && chat === shown.chat) return;
    const hasBegun = shown.draft === NEW && chat === shown.chat; // its first message was sent
    shown = { draft: key, chat };
    if (hasBegun) {
      drafts.set(key, current.peek());
      drafts.delete(NEW);
    } else current.value = drafts.get(key) ?? EMPTY;
  });
  drafts.delete(EARLY);
  const { text, attachments } = early;
  if (text || attachments.length > 0) setDraft({ text: [current.peek().text, text].filter(Boolean).join("\n"), attachments });
  let knew = false;
  effect(() => {
    const knows = takes("image") !== undefined;
    if (knows && !knew) untracked(dropUntaken);
    knew = knows;
  });
}

/** Take out again what was attached before the server said that its model does not take it. */
function dropUntaken(): void {
  for (const [key, { attachments }] of drafts) {
    for (const one of attachments) {
      void attempt(() => {
        const why = refusal(one);
        if (why === null) return;
        change(key, (others) => others.filter(({ id }) => id !== one.id));
        throw new Error(why);
      });
    }
  }
}

function kept(): [string, string][] {
  try {
    return JSON.parse(recall("drafts") ?? "[]") as [string, string][];
  } catch {
    return []; // something else has written there
  }
}

/** Attach files to the draft, and report those that cannot be attached. */
export async function attach(files: Iterable<File> | Promise<Iterable<File>>): Promise<void> {
  const key = shown.draft;
  let all: Iterable<File> = [];
  await attempt(async () => (all = await files));
  reading.value += 1;
  for (const file of all) await attempt(() => attachTo(key, file));
  reading.value -= 1;
}

async function attachTo(key: string, file: File): Promise<void> {
  const attachment = await readAttachment(file, newId());
  const why = refusal(attachment); // the server may have said so while it was read
  if (why) throw new Error(why);
  change(key === EARLY ? shown.draft : key, (others) => [...others, attachment]);
}

function change(key: string, to: (attachments: Attachment[]) => Attachment[]): void {
  const before = drafts.get(key) ?? EMPTY;
  const changed = { ...before, attachments: to(before.attachments) };
  drafts.set(key, changed);
  if (key === shown.draft) current.value = changed;
}

/** Attach a text that was pasted, and give the id of the attachment. */
export function attachText(text: string): string {
  const id = newId();
  const { size } = new Blob([text]);
  const attachment = { id, name: t("Pasted text.txt"), type: "text/plain", size, text };
  setDraft({ attachments: [...current.peek().attachments, attachment] });
  return id;
}

/** Take an attachment out again. */
export function detach(id: string): void {
  setDraft({ attachments: current.peek().attachments.filter((one) => one.id !== id) });
}
