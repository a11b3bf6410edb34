// Calls of the page's own tools: asked for by the model, made by the page, and given back to the model.

import { signal, type ReadonlySignal } from "@preact/signals";

import type { Message } from "../types";
import { reading } from "./db";
import { callTool, pageTools, type PageTool } from "./mcp";
import { afterAnswers } from "./runs";
import { settings } from "./settings";
import { change, chatOf } from "./shown";
import { giveResults } from "./talk";
import { pathTo, treeOf } from "./tree";

/** Answers in a row that may call tools without a person. */
const MOST_STEPS = 16;

const making = signal<ReadonlyMap<string, AbortController>>(new Map());

/** The answers whose calls are being made, by their ids. */
export const callsBeingMade: ReadonlySignal<ReadonlyMap<string, AbortController>> = making;

/** The tools of an answer's calls; null: some of them are not the page's. */
export function toolsOf({ toolCalls }: Message): PageTool[] | null {
  const found = toolCalls.map(({ name }) => pageTools.value.find((tool) => tool.name === name));
  return found.length > 0 && found.every((tool) => tool !== undefined) ? (found as PageTool[]) : null;
}

/** Make calls that need no approval as soon as the model has asked for them. */
export function startCalls(): void {
  afterAnswers(async (message) => {
    const tools = message.state === "done" ? toolsOf(message) : null;
    if (!tools) return;
    const allowed = (chatOf(message.chat)?.tools ?? settings.peek().tools).allowed;
    const needNone = tools.every(({ name, writes }) => !writes || allowed.includes(name));
    if (needNone && (await stepsBefore(message)) < MOST_STEPS) await makeCalls(message);
  });
}

/** The answers since the last question. */
async function stepsBefore(message: Message): Promise<number> {
  const path = pathTo(treeOf(await reading((tx) => tx.messagesOf(message.chat))), message.id);
  const asked = path.findLastIndex(({ role }) => role === "user");
  return path.slice(asked).filter(({ role }) => role === "assistant").length;
}

/** Make the calls of an answer, and let the model continue with the results. */
export async function makeCalls(message: Message): Promise<void> {
  const tools = toolsOf(message);
  if (!tools || making.peek().has(message.id)) return;
  const abort = new AbortController();
  making.value = new Map(making.peek()).set(message.id, abort);
  try {
    const results = await Promise.all(
      message.toolCalls.map(({ arguments: written }, index) => resultOf(tools[index]!, written, abort.signal)),
    );
    await giveResults(message, results);
  } finally {
    const next = new Map(making.peek());
    next.delete(message.id);
    making.value = next;
  }
}

/** The result of a call; a failure is for the model as well. */
async function resultOf(tool: PageTool, written: string, signal: AbortSignal): Promise<string> {
  try {
    return await callTool(tool, written, signal);
  } catch (error) {
    const why = signal.aborted ? "The user stopped this call." : error instanceof Error ? error.message : String(error);
    return JSON.stringify({ error: why });
  }
}

/** Make the calls of an answer, and all later ones of these tools in its chat. */
export async function makeAlways(message: Message): Promise<void> {
  const before = chatOf(message.chat)?.tools ?? settings.peek().tools;
  const names = message.toolCalls.map(({ name }) => name);
  await change(message.chat, { tools: { ...before, allowed: [...new Set([...before.allowed, ...names])] } });
  await makeCalls(message);
}

/** Make none of the calls of an answer; the model learns that they were not allowed. */
export async function denyCalls(message: Message): Promise<void> {
  await giveResults(message, message.toolCalls.map(() => null));
}
