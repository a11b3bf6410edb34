// A client of MCP servers, over HTTP and through this server's proxy: https://modelcontextprotocol.io.
//
// The official SDK for it is four times as large as the rest of the page.

import { isRecord } from "../state/json";
import { t } from "../words";
import { posting, request, ServerError } from "./api";
import { SseParser } from "./sse";

type Fields = Record<string, unknown>;

const VERSION = "2025-06-18";

/** Headers of this name with this in front are sent on by the proxy. */
const PREFIX = "x-trioserve-proxy-header-";

/** Milliseconds that a server may take for all but calls, and the pages of a list that are read. */
const PATIENCE = 30_000;
const MOST_PAGES = 20;

export class McpClient {
  #session = "";
  #version = VERSION;
  #lastId = 0;
  /** The kinds that the server offers: tools, prompts, resources. */
  #offers: Fields = {};

  constructor(
    private readonly url: string,
    private readonly token: string,
  ) {}

  /** Begin a session. Throws an Error for people. */
  async connect(): Promise<void> {
    this.#session = "";
    this.#version = VERSION;
    const begun = await this.#ask("initialize", {
      protocolVersion: VERSION,
      capabilities: {},
      clientInfo: { name: "trioserve-page", version: "1" },
    });
    if (typeof begun.protocolVersion === "string") this.#version = begun.protocolVersion;
    this.#offers = isRecord(begun.capabilities) ? begun.capabilities : {};
    await this.#post({ jsonrpc: "2.0", method: "notifications/initialized" }, AbortSignal.timeout(PATIENCE));
  }

  /** All of what the server has of a kind; none if it offers no such thing. */
  async list(kind: "tools" | "prompts" | "resources"): Promise<Fields[]> {
    const all: Fields[] = [];
    if (!isRecord(this.#offers[kind])) return all;
    let cursor: unknown;
    for (let page = 0; page < MOST_PAGES; page++) {
      const part = await this.call(`${kind}/list`, cursor === undefined ? {} : { cursor });
      if (Array.isArray(part[kind])) all.push(...(part[kind] as unknown[]).filter(isRecord));
      cursor = part.nextCursor;
      if (typeof cursor !== "string") break;
    }
    return all;
  }

  /** Ask for something. A session that the server has forgotten is begun again, once. */
  async call(method: string, params: Fields, signal?: AbortSignal): Promise<Fields> {
    try {
      return await this.#ask(method, params, signal);
    } catch (error) {
      if (!(error instanceof ServerError && error.status === 404 && this.#session)) throw error;
      await this.connect();
      return this.#ask(method, params, signal);
    }
  }

  async #ask(method: string, params: Fields, signal = AbortSignal.timeout(PATIENCE)): Promise<Fields> {
    const id = ++this.#lastId;
    const response = await this.#post({ jsonrpc: "2.0", id, method, params }, signal);
    const answer = await answerIn(response, id);
    if (isRecord(answer.error)) throw new Error(String(answer.error.message ?? t("The MCP server reports an error.")));
    return isRecord(answer.result) ? answer.result : {};
  }

  async #post(message: Fields, signal: AbortSignal): Promise<Response> {
    const headers: Record<string, string> = {
      accept: "application/json, text/event-stream",
      "content-type": "application/json",
      ...(message.method === "initialize" ? {} : { "mcp-protocol-version": this.#version }),
      ...(this.#session ? { "mcp-session-id": this.#session } : {}),
      ...(this.token ? { authorization: `Bearer ${this.token}` } : {}),
    };
    const sent = Object.fromEntries(Object.entries(headers).map(([name, value]) => [PREFIX + name, value]));
    const response = await request(`cors-proxy?url=${encodeURIComponent(this.url)}`, posting(message, { headers: sent, signal }));
    this.#session = response.headers.get("Mcp-Session-Id") ?? this.#session;
    return response;
  }
}

/** The answer to a request, which is the body or comes in a stream after other messages. */
async function answerIn(response: Response, id: number): Promise<Fields> {
  if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
    const body: unknown = await response.json().catch(() => null);
    if (isRecord(body)) return body;
    throw new Error(t("The MCP server’s answer is no JSON."));
  }
  const reader = response.body!.getReader();
  const parser = new SseParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error(t("The MCP server’s answer broke off."));
      for (const item of parser.push(value)) {
        const message = item.kind === "event" ? parsed(item.data) : null;
        if (isRecord(message) && message.id === id) return message;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined); // the unread rest does not matter, nor does its error
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
