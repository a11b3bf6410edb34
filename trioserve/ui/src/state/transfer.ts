// Chats as a JSON file, and back.

import type { Attachment, CallState, Chat, MadeCall, Message, Role, Step, ToolCall } from "../types";
import { t } from "../words";
import { newId } from "./ids";
import { isRecord } from "./json";
import { blobIn, dataUrlOf } from "./media";
import { isSampling } from "./settings";
import { fromLlamaServer } from "./llama_chats";
import { isZip, textsIn } from "./zip";

const FORMAT = "trioserve-chats";
const VERSION = 1;

/** Ids of chats are sent in a header. */
const GOOD_ID = /^[\w.-]{1,64}$/;

type Fields = Record<string, unknown>;

export interface Whole {
  chat: Chat;
  messages: Message[];
}

/** Write chats as a file. Throws an Error for people. */
export async function written(wholes: readonly Whole[], now = new Date()): Promise<Blob> {
  const head = { format: FORMAT, version: VERSION, exportedAt: now.toISOString() };
  // In pieces: with pictures, all chats may be more than one text can be.
  const pieces = [`${JSON.stringify(head, null, 1).slice(0, -2)},\n "chats": [`];
  for (const [place, { chat, messages }] of wholes.entries()) {
    pieces.push(`${place ? "," : ""}\n${JSON.stringify(chat, null, 1).slice(0, -2)},\n "messages": [`);
    for (const [index, message] of messages.entries()) {
      pieces.push(`${index ? "," : ""}\n${JSON.stringify(await exported(message), null, 1)}`);
    }
    pieces.push("]}");
  }
  return new Blob([...pieces, "]\n}"], { type: "application/json" });
}

async function exported({ chat: _, stream: __, ...message }: Message): Promise<unknown> {
  const files = message.attachments.map(async (file) => {
    return file.data ? { ...file, data: await dataUrlOf(file) } : file;
  });
  return { ...message, attachments: await Promise.all(files) };
}

/** The texts of a file, which may be a ZIP of several. */
export async function textsOf(bytes: Uint8Array<ArrayBuffer>): Promise<string[]> {
  return isZip(bytes) ? textsIn(bytes) : [new TextDecoder().decode(bytes)];
}

/**
 * Read the text of a file. Messages get new ids, so that they can replace none that are here.
 * Throws an Error for people.
 */
export function read(text: string): Whole[] {
  const file = parsed(text);
  if (isRecord(file) && file.format === FORMAT) {
    if (file.version !== VERSION) {
      throw new Error(t("This file comes from a newer version of the page."));
    }
    return each(file.chats, "chats", wholeOf);
  }
  const theirs = fromLlamaServer(file);
  if (theirs === null) throw new Error(t("This file has no chats of this page or of llama-server’s."));
  return each(theirs, "", wholeOf);
}

/** JSON, or a JSON value a line. */
function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    // Perhaps it is one a line.
  }
  try {
    return text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line) as unknown);
  } catch {
    throw new Error(t("This file is not JSON."));
  }
}

function wholeOf(given: Fields, at: string): Whole {
  const inside = `${at}.messages`;
  const olds = each(given.messages, inside, (one, where) => string(one.id, `${where}.id`));
  const ids = new Map(olds.map((old) => [old, newId()]));
  if (ids.size !== olds.length) throw wrong(inside, "has an id twice");
  const asked = string(given.id, `${at}.id`);
  const id = GOOD_ID.test(asked) ? asked : newId();
  const messages = each(given.messages, inside, (one, where) =>
    messageOf(one, { chat: id, ids, at: where }),
  );
  checkTree(messages, at);
  const createdAt = time(given.createdAt, `${at}.createdAt`);
  const leaf = given.leaf === null ? null : ids.get(string(given.leaf, `${at}.leaf`));
  if (leaf === undefined) throw wrong(`${at}.leaf`, "is no message");
  const sampling = given.sampling ?? {};
  if (!isSampling(sampling)) throw wrong(`${at}.sampling`, "has a value of a wrong type");
  // Not `tools`: what a model may do here is not up to a file.
  const chat: Chat = {
    id,
    title: string(given.title, `${at}.title`).slice(0, 500),
    createdAt,
    updatedAt: time(given.updatedAt ?? createdAt, `${at}.updatedAt`),
    leaf,
    system: string(given.system ?? "", `${at}.system`),
    sampling,
    model: string(given.model ?? "", `${at}.model`),
    ...(given.pinned === true ? { pinned: true } : {}),
    ...startOf(given.start, ids),
  };
  return { chat, messages };
}

/** The first message that the model gets, if the file has it for a chat with a full context. */
function startOf(given: unknown, ids: ReadonlyMap<string, string>): Pick<Chat, "start"> {
  if (!isRecord(given) || typeof given.summary !== "string" || typeof given.since !== "number") return {};
  const message = ids.get(String(given.message));
  return message ? { start: { message, summary: given.summary, since: given.since } } : {};
}

interface Where {
  chat: string;
  ids: ReadonlyMap<string, string>;
  at: string;
}

const ROLES: readonly string[] = ["system", "user", "assistant", "tool"] satisfies Role[];
const STATES: readonly unknown[] = ["done", "stopped", "failed"] satisfies Message["state"][];

function messageOf(given: Fields, { chat, ids, at }: Where): Message {
  const role = string(given.role, `${at}.role`);
  if (!ROLES.includes(role)) throw wrong(`${at}.role`, "is none that there is");
  const parent = given.parent === null ? null : ids.get(string(given.parent, `${at}.parent`));
  if (parent === undefined) throw wrong(`${at}.parent`, "is no message of this chat");
  // An answer that was still written when the file was made is one that was stopped.
  const state = STATES.includes(given.state) ? (given.state as Message["state"]) : "stopped";
  return {
    id: ids.get(given.id as string)!,
    chat,
    parent,
    role: role as Role,
    content: string(given.content, `${at}.content`),
    reasoning: string(given.reasoning ?? "", `${at}.reasoning`),
    toolCalls: each(given.toolCalls ?? [], `${at}.toolCalls`, callOf),
    ...(given.steps === undefined ? {} : { steps: each(given.steps, `${at}.steps`, stepOf) }),
    attachments: each(given.attachments ?? [], `${at}.attachments`, fileOf),
    model: string(given.model ?? "", `${at}.model`),
    createdAt: time(given.createdAt, `${at}.createdAt`),
    state,
    ...(given.finish === undefined ? {} : { finish: string(given.finish, `${at}.finish`) }),
    ...(given.error === undefined ? {} : { error: string(given.error, `${at}.error`) }),
    ...(given.full === true ? { full: true } : {}),
    ...(isStats(given.stats) ? { stats: given.stats } : {}),
  };
}

function callOf(given: Fields, at: string): ToolCall {
  return {
    id: string(given.id, `${at}.id`),
    name: string(given.name, `${at}.name`),
    arguments: string(given.arguments, `${at}.arguments`),
  };
}

function stepOf(given: Fields, at: string): Step {
  return {
    content: string(given.content, `${at}.content`),
    reasoning: string(given.reasoning, `${at}.reasoning`),
    calls: each(given.calls, `${at}.calls`, madeCallOf),
  };
}

const CALL_STATES: readonly unknown[] = ["done", "failed", "stopped", "denied"] satisfies CallState[];

function madeCallOf(given: Fields, at: string): MadeCall {
  const texts = ["preview", "output", "result", "diff"].filter((name) => given[name] !== undefined);
  return {
    ...callOf(given, at),
    title: string(given.title, `${at}.title`),
    writes: given.writes === true,
    state: CALL_STATES.includes(given.state) ? (given.state as CallState) : "stopped",
    ...Object.fromEntries(texts.map((name) => [name, string(given[name], `${at}.${name}`)])),
    ...(Number.isFinite(given.seconds) ? { seconds: given.seconds as number } : {}),
  };
}

function fileOf(given: Fields, at: string): Attachment {
  const name = string(given.name, `${at}.name`);
  if (given.data !== undefined) {
    const data = blobIn(string(given.data, `${at}.data`));
    if (!data) throw wrong(`${at}.data`, "is no picture, recording or video");
    return { id: newId(), name, type: data.type, size: data.size, text: "", data };
  }
  const text = string(given.text, `${at}.text`);
  return {
    id: newId(),
    name,
    type: string(given.type ?? "text/plain", `${at}.type`),
    size: typeof given.size === "number" ? given.size : text.length,
    text,
  };
}

const STATS = [
  "tokens", "tokensPerSecond", "ttft", "promptTokens", "cachedTokens", "contextUsed", "contextSize",
];

function isStats(value: unknown): value is NonNullable<Message["stats"]> {
  return isRecord(value) && STATS.every((name) => Number.isFinite(value[name]));
}

/** Each message has to lead to the first: no circles. */
function checkTree(messages: readonly Message[], at: string): void {
  const parents = new Map(messages.map((message) => [message.id, message.parent]));
  const good = new Set<string | null>([null]);
  for (const { id } of messages) {
    const way: string[] = [];
    const seen = new Set<string>();
    for (let one: string | null = id; !good.has(one); one = parents.get(one!) ?? null) {
      if (seen.has(one!)) throw wrong(`${at}.messages`, "lead back to themselves");
      seen.add(one!);
      way.push(one!);
    }
    for (const one of way) good.add(one);
  }
}

// -- values of a file

function wrong(at: string, what: string): Error {
  return new Error(t("The file cannot be read: {at} {what}.", { at, what }));
}

/** A list of objects, each with its place in the file. */
function each<T>(value: unknown, at: string, make: (one: Fields, at: string) => T): T[] {
  if (!Array.isArray(value)) throw wrong(at, "is no list");
  return value.map((one: unknown, index) => {
    const where = `${at}[${index}]`;
    if (!isRecord(one)) throw wrong(where, "is no object");
    return make(one, where);
  });
}

function string(value: unknown, at: string): string {
  if (typeof value !== "string") throw wrong(at, "is no text");
  return value;
}

/** Milliseconds since 1970, up to the last date that there is. */
function time(value: unknown, at: string): number {
  if (typeof value !== "number" || !(Math.abs(value) <= 8.64e15)) throw wrong(at, "is no time");
  return value;
}
