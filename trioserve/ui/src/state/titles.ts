// Titles of chats that the model writes while the server has nothing else to do.

import { computed, effect } from "@preact/signals";

import { ServerError } from "../server/api";
import { pauseFor } from "../server/wake";
import type { Chat, Message, Model } from "../types";
import { isBusy } from "./activity";
import { modelOf } from "./choice";
import { ask } from "./context";
import { reading } from "./db";
import { models } from "./models";
import { runs } from "./runs";
import { props, server } from "./server";
import { settings } from "./settings";
import { change, chatOf, chats } from "./shown";
import { treeOf, pathTo } from "./tree";

/** Milliseconds of quiet before a title is asked for, and between two looks for other requests. */
const QUIET = 2_000;
const LOOK = 400;

/** The lowest that a request can have, where higher goes first. */
const PRIORITY = -100;

/** Characters of a message that the model is given, and of a title. */
const EXCERPT = 1_000;
const LONGEST = 80;

const TASK = "Write a title of at most six words for this conversation, in its language. Answer with the title only.";

/** Chats that have been tried since the page was loaded. */
const tried = new Set<string>();

/** The next chat that wants a title; null: none, or the server is not just idle. */
const next = computed<Chat | null>(() => {
  if (!settings.value.titles || runs.value.size > 0 || server.value.state !== "ready") return null;
  return chats.value.find((chat) => chat.untitled && !tried.has(chat.id) && canAsk(chat)) ?? null;
});

function canAsk(chat: Chat): boolean {
  const name = modelOf(chat);
  const model = models.value.find(({ id, aliases }) => id === name || aliases.includes(name));
  return model?.status === "loaded" && canTitle(model);
}

/** True if the titles of a model are worth reading: a toy and a base model, which has no template, write no titles. */
export function canTitle({ toy, hasTemplate }: Pick<Model, "toy" | "hasTemplate">): boolean {
  return !toy && hasTemplate !== false;
}

/** Write titles from now on. Another request ends it, of this page or of another client; then it waits again. */
export function startTitles(): void {
  effect(() => {
    const chat = next.value;
    if (!chat) return undefined;
    const abort = new AbortController();
    void write(chat, abort.signal);
    return () => abort.abort();
  });
}

async function write(chat: Chat, signal: AbortSignal): Promise<void> {
  try {
    while (!(await attempt(chat, signal)));
  } catch (error) {
    if (signal.aborted) return; // the next quiet time is another try
    tried.add(chat.id);
    if (!(error instanceof ServerError)) throw error;
    console.info("The model writes no title:", error.message);
  }
}

/** Wait until the server is idle, and ask for a title; false: another request has ended that. */
async function attempt(chat: Chat, signal: AbortSignal): Promise<boolean> {
  do await pauseFor(QUIET, signal);
  while (document.hidden || (await isBusy(modelOf(chat), 0)));
  const yielding = new AbortController();
  const timer = setInterval(() => void giveWay(chat, yielding), LOOK);
  try {
    const title = titleIn(await ask(await bodyOf(chat), AbortSignal.any([signal, yielding.signal])));
    signal.throwIfAborted();
    tried.add(chat.id);
    // A person may have written one meanwhile, in another tab.
    if (chatOf(chat.id)?.untitled) await change(chat.id, { ...(title ? { title } : {}), untitled: undefined });
    return true;
  } catch (error) {
    if (yielding.signal.aborted && !signal.aborted) return false;
    throw error;
  } finally {
    clearInterval(timer);
  }
}

/** End the request when another one is there. */
async function giveWay(chat: Chat, yielding: AbortController): Promise<void> {
  if (await isBusy(modelOf(chat), 1).catch(() => false)) yielding.abort();
}

async function bodyOf(chat: Chat): Promise<Record<string, unknown>> {
  const path = pathTo(treeOf(await reading((tx) => tx.messagesOf(chat.id))), chat.leaf);
  const said = path.slice(0, 2).map(({ role, content }: Message) => `${role}: ${content.slice(0, EXCERPT)}`);
  const model = modelOf(chat);
  return {
    messages: [{ role: "user", content: `${said.join("\n\n")}\n\n${TASK}` }],
    ...(model ? { model } : {}),
    max_tokens: 32,
    temperature: 0.2,
    reasoning_effort: "none",
    priority: props.peek()?.priority_order === "lower-first" ? -PRIORITY : PRIORITY,
  };
}

/** The title in a model's answer: its first line, without marks around it. Empty: no title. */
export function titleIn(written: string): string {
  const [line = ""] = written.replace(/<think>[\s\S]*?(<\/think>|$)/g, "").trim().split("\n");
  const words = line.replace(/^[#*_"'“”„«»`\s]+|[*_"'“”„«»`\s.]+$/g, "").replace(/^(title|titel|标题)\s*[:：]\s*/i, "");
  const characters = Array.from(words.replace(/\s+/g, " ").trim());
  return characters.length > LONGEST ? `${characters.slice(0, LONGEST).join("").trimEnd()}…` : characters.join("");
}
