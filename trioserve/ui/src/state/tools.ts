// The tools that the server can run, which of them a chat may use, and what a person says to their calls.

import { computed, signal, type ReadonlySignal } from "@preact/signals";

import { posting, request, requestJson, ServerError } from "../server/api";
import type { Chat, ServerTool, Step, ToolChoice } from "../types";
import { t } from "../words";
import { isRecord } from "./json";
import { definitionOf, pageTools } from "./mcp";
import { settings } from "./settings";
import { change, chatOf, openChat } from "./shown";

const known = signal<ServerTool[] | null>(null);

/** The server's tools, built-in ones first; null: it has not said. */
export const serverTools: ReadonlySignal<ServerTool[] | null> = known;

/** The page's own tools. */
export const tools: ReadonlySignal<ServerTool[] | null> = computed(() => known.value && [...known.value, ...pageTools.value]);

/** The tools that the open chat may use. */
export const choice: ReadonlySignal<ToolChoice> = computed(() => openChat.value?.chat.tools ?? settings.value.tools);

/** Ask the server which tools it has. */
export async function readTools(hasSome: boolean, options: RequestInit = {}): Promise<void> {
  const given = hasSome ? await requestJson<unknown>("tools", options) : [];
  const next = (Array.isArray(given) ? given : []).filter(isRecord).map(toolIn);
  if (JSON.stringify(next) !== JSON.stringify(known.peek())) known.value = next;
}

function toolIn(given: Record<string, unknown>): ServerTool {
  const text = (value: unknown) => (typeof value === "string" ? value : "");
  const definition = isRecord(given.definition) ? given.definition : {};
  const does = isRecord(definition.function) ? definition.function : {};
  const name = text(given.tool);
  return {
    name,
    title: text(given.display_name) || name,
    description: text(does.description),
    origin: given.type === "mcp" ? text(given.mcp_server) || "MCP" : "",
    writes: isRecord(given.permissions) && given.permissions.write === true,
  };
}

/** Change what the open chat may use. */
export async function choose(how: Partial<ToolChoice>): Promise<void> {
  const chat = openChat.peek()?.chat;
  if (chat) await change(chat.id, { tools: { ...choice.peek(), ...how } });
}

function isOfPage(name: string): boolean {
  return pageTools.peek().some((tool) => tool.name === name);
}

/** The fields of a request for the tools that a chat may use. */
export function toolsFor(chat: Chat): Record<string, unknown> {
  const { on, cwd } = chat.tools ?? settings.peek().tools;
  const there = known.peek();
  const names = on.filter((name) => (there ? there.some((tool) => tool.name === name) : !isOfPage(name)));
  const own = pageTools.peek().filter(({ name }) => on.includes(name)).map(definitionOf);
  const given = own.length > 0 ? { tools: own } : {};
  if (names.length === 0) return given;
  return { ...given, trioserve_run_tools: { tools: names, approval: "ask", ...(cwd.trim() ? { cwd: cwd.trim() } : {}) } };
}

/** True if a chat's calls of a tool need no approval. */
export function isAllowed(chat: string, tool: string): boolean {
  return (chatOf(chat)?.tools ?? settings.peek().tools).allowed.includes(tool);
}

/** Let a call through that waits, or refuse it. `answer` is what the server calls the answer that it is in. */
export async function decide(answer: string | undefined, call: string, approve: boolean): Promise<void> {
  await tell(answer, "approve", { call_id: call, approve });
}

/** Let all calls of a tool through that there will be in a chat, and those of a step that wait for it. */
export async function allowAll(chat: string, answer: string | undefined, { calls }: Step, tool: string): Promise<void> {
  const before = chatOf(chat)?.tools ?? settings.peek().tools;
  const allowed = [...before.allowed.filter((name) => name !== tool), tool];
  await change(chat, { tools: { ...before, allowed } });
  const waiting = calls.filter(({ name, state }) => name === tool && state === "asked");
  await Promise.all(waiting.map(({ id }) => decide(answer, id, true)));
}

/** Stop a call; the answer continues without its result. */
export async function stopCall(answer: string | undefined, call: string): Promise<void> {
  await tell(answer, "stop", { call_id: call });
}

const DECIDED = 409;

async function tell(answer: string | undefined, what: string, body: Record<string, unknown>): Promise<void> {
  if (!answer) throw new Error(t("The answer has ended."));
  try {
    await request(`v1/chat/completions/${encodeURIComponent(answer)}/${what}`, posting(body));
  } catch (error) {
    if (error instanceof ServerError && error.status === DECIDED) return; // in another tab
    throw error;
  }
}
