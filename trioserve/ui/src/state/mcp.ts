// The MCP servers that a person has added to the page, with their tools, prompts and resources.

import { computed, effect, signal, type ReadonlySignal } from "@preact/signals";

import { McpClient } from "../server/mcp";
import type { McpEntry, ServerTool } from "../types";
import { t } from "../words";
import { isRecord } from "./json";
import { settings } from "./settings";

type Fields = Record<string, unknown>;

export interface McpPrompt {
  name: string;
  title: string;
  description: string;
  arguments: { name: string; description: string; isRequired: boolean }[];
}

export interface McpResource {
  uri: string;
  name: string;
  description: string;
}

/** A tool of one of these servers. */
export interface PageTool extends ServerTool {
  server: string;
  /** Its name at the server. */
  own: string;
  /** Of its arguments, in JSON Schema. */
  schema: Fields;
}

export interface McpState {
  entry: McpEntry;
  state: "connecting" | "connected" | "failed";
  /** Why it has failed. */
  message: string;
  tools: PageTool[];
  prompts: McpPrompt[];
  resources: McpResource[];
}

const states = signal<ReadonlyMap<string, McpState>>(new Map());
const clients = new Map<string, McpClient>();

/** In the order of the settings. */
export const mcpServers: ReadonlySignal<McpState[]> = computed(() =>
  settings.value.mcp.flatMap(({ id }) => states.value.get(id) ?? []),
);

/** The tools of all servers, by names that are theirs alone. */
export const pageTools: ReadonlySignal<PageTool[]> = computed(() => mcpServers.value.flatMap(({ tools }) => tools));

/** Connect to the servers in the settings, now and when they change, where there is a proxy to them. */
export function startMcp(hasProxy: ReadonlySignal<boolean>): void {
  let before = new Map<string, string>();
  effect(() => {
    const wanted = new Map(hasProxy.value ? settings.value.mcp.map((entry) => [entry.id, entry] as const) : []);
    const now = new Map([...wanted].map(([id, entry]) => [id, JSON.stringify(entry)]));
    for (const id of before.keys()) if (now.get(id) !== before.get(id)) forget(id);
    for (const [id, entry] of wanted) if (now.get(id) !== before.get(id)) void connect(entry);
    before = now;
  });
}

function forget(id: string): void {
  clients.delete(id);
  const next = new Map(states.peek());
  next.delete(id);
  states.value = next;
}

/** Connect to a server, or read again what it has. */
export async function connect(entry: McpEntry): Promise<void> {
  const client = new McpClient(entry.url, entry.token);
  clients.set(entry.id, client);
  const set = (how: Partial<McpState>) => {
    if (clients.get(entry.id) !== client) return; // it was changed meanwhile
    const none = { entry, state: "connecting", message: "", tools: [], prompts: [], resources: [] } as const;
    states.value = new Map(states.peek()).set(entry.id, { ...none, ...how } as McpState);
  };
  set({});
  try {
    await client.connect();
    const [tools, prompts, resources] = await Promise.all([client.list("tools"), client.list("prompts"), client.list("resources")]);
    set({
      state: "connected",
      tools: withNames(tools.map((tool) => toolIn(tool, entry))),
      prompts: prompts.map(promptIn),
      resources: resources.map(resourceIn),
    });
  } catch (error) {
    set({ state: "failed", message: error instanceof Error ? error.message : String(error) });
  }
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function toolIn(given: Fields, entry: McpEntry): PageTool {
  const own = text(given.name);
  const hints = isRecord(given.annotations) ? given.annotations : {};
  // APIs take such names only; the id keeps those of two servers apart.
  const name = `${own.replace(/[^\w-]/g, "_").slice(0, 48)}_${entry.id.slice(0, 4)}`;
  const description = text(given.description);
  return {
    name,
    title: text(given.title) || text(hints.title) || own,
    description,
    origin: entry.name,
    writes: hints.readOnlyHint !== true,
    server: entry.id,
    own,
    schema: isRecord(given.inputSchema) ? given.inputSchema : { type: "object" },
  };
}

/** Tools with names that are different. */
function withNames(tools: PageTool[]): PageTool[] {
  const taken = new Set<string>();
  return tools.map((tool) => {
    let { name } = tool;
    for (let number = 2; taken.has(name); number++) name = `${tool.name}${number}`;
    taken.add(name);
    return { ...tool, name };
  });
}

/** A tool as a request declares it. */
export function definitionOf({ name, description, schema }: PageTool): Fields {
  return { type: "function", function: { name, description, parameters: schema } };
}

function promptIn(given: Fields): McpPrompt {
  const list = Array.isArray(given.arguments) ? given.arguments.filter(isRecord) : [];
  return {
    name: text(given.name),
    title: text(given.title) || text(given.name),
    description: text(given.description),
    arguments: list.map((one) => ({ name: text(one.name), description: text(one.description), isRequired: one.required === true })),
  };
}

function resourceIn(given: Fields): McpResource {
  const uri = text(given.uri);
  return { uri, name: text(given.title) || text(given.name) || uri, description: text(given.description) };
}

/** Call a tool; what it gives back, for the model. */
export async function callTool(tool: PageTool, written: string, signal: AbortSignal): Promise<string> {
  const given: unknown = written.trim() ? JSON.parse(written) : {};
  const result = await clientOf(tool.server).call("tools/call", { name: tool.own, arguments: given }, signal);
  const parts = Array.isArray(result.content) ? result.content.filter(isRecord).map(textOf) : [];
  const said = parts.join("\n") || (result.structuredContent === undefined ? "" : JSON.stringify(result.structuredContent));
  return result.isError === true ? JSON.stringify({ error: said }) : said;
}

/** The text of a prompt, as a message. */
export async function readPrompt(server: string, name: string, values: Record<string, string>): Promise<string> {
  const { messages } = await clientOf(server).call("prompts/get", { name, arguments: values });
  const list = Array.isArray(messages) ? messages.filter(isRecord) : [];
  return list.map(({ content }) => (isRecord(content) ? textOf(content) : "")).filter(Boolean).join("\n\n");
}

/** A resource as a file to attach. */
export async function readResource(server: string, { uri, name }: McpResource): Promise<File> {
  const { contents } = await clientOf(server).call("resources/read", { uri });
  const [first] = Array.isArray(contents) ? contents.filter(isRecord) : [];
  if (!first) throw new Error(t("The resource {name} is empty.", { name }));
  const type = text(first.mimeType);
  const data = typeof first.blob === "string" ? Uint8Array.from(atob(first.blob), (one) => one.charCodeAt(0)) : text(first.text);
  return new File([data], name, { type });
}

function textOf(part: Fields): string {
  if (typeof part.text === "string") return part.text;
  if (isRecord(part.resource)) return text(part.resource.text);
  return `[${text(part.type) || "content"}]`; // what is no text is not for the model
}

function clientOf(server: string): McpClient {
  const client = clients.get(server);
  if (!client) throw new Error(t("This MCP server is no longer there."));
  return client;
}
