// Requests to the server that the page came from.

import { settings } from "../state/settings";
import { t } from "../words";

export type Reason =
  | "network" // no answer at all
  | "key"
  | "loading"
  | "closing"
  | "full"
  | "context" // the chat does not fit into it
  | "away" // as a proxy reports
  | "unknown" // 404
  | "other";

/** The error, in words for people. */
export class ServerError extends Error {
  override readonly name = "ServerError";

  /** `status` 0: no answer came. `retryAfter`: milliseconds that the server asks for. */
  constructor(
    message: string,
    readonly status = 0,
    readonly code: string = "",
    readonly retryAfter?: number,
  ) {
    super(message);
  }

  get reason(): Reason {
    if (this.status === 0) return "network";
    if (this.status === 401) return "key";
    if (this.status === 404) return "unknown";
    if (["context_length_exceeded", "exceed_context_size_error"].includes(this.code)) return "context";
    if (this.status === 429 || this.code === "memory_full") return "full";
    if (this.status === 502 || this.code === NO_JSON) return "away";
    if (this.status === 503 && /^loading model/i.test(this.message)) return "loading";
    if (this.status === 503 && /shutting down/i.test(this.message)) return "closing";
    return "other";
  }

  /** True if the same request may well succeed a little later. */
  get passes(): boolean {
    return ["network", "loading", "closing", "full", "away"].includes(this.reason);
  }
}

/** The code of a 503 or 504 that this server did not write. */
const NO_JSON = "no_json";

/** The address of a route, which is given without a leading slash: the page may have a prefix. */
export function address(path: string): string {
  return new URL(path, document.baseURI).href;
}

/** Send a request, with the key if there is one. Throws a ServerError for all but a 2xx. */
export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  const key = settings.peek().apiKey.trim();
  if (key) headers.set("Authorization", `Bearer ${latin1(key)}`);
  let response: Response;
  try {
    response = await fetch(address(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError(t("The server cannot be reached."));
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Send a request whose answer is JSON. */
export async function requestJson<T>(path: string, options: RequestInit = {}): Promise<T> {
  const response = await request(path, options);
  try {
    return (await response.json()) as T;
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError(t("The answer of the server broke off, or is no JSON."));
  }
}

/** The options of a POST with a JSON body. */
export function posting(body: unknown, options: RequestInit = {}): RequestInit {
  const headers = new Headers(options.headers);
  headers.set("Content-Type", "application/json");
  return { ...options, method: "POST", headers, body: JSON.stringify(body) };
}

/** Headers are bytes. A browser takes only characters that are one byte each. */
function latin1(text: string): string {
  return Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
}

/** Read an error as the server writes it, in an answer or as the last event of a stream. */
export function errorFrom(body: unknown, status: number, retryAfter?: number): ServerError | null {
  const error = (body as { error?: unknown } | null)?.error as
    | { message?: unknown; code?: unknown; type?: unknown }
    | undefined;
  if (typeof error?.message !== "string") return null;
  const own = typeof error.code === "number" ? error.code : status;
  const code = typeof error.code === "string" ? error.code : error.type; // as llama-server has it
  return new ServerError(error.message, own, String(code ?? ""), retryAfter);
}

async function errorOf(response: Response): Promise<ServerError> {
  const wait = secondsOf(response.headers.get("Retry-After"));
  const retryAfter = wait === undefined ? undefined : wait * 1000;
  const text = await response.text().catch(() => "");
  try {
    const error = errorFrom(JSON.parse(text), response.status, retryAfter);
    if (error) return error;
  } catch {
    // No JSON: what is between us and the server has answered.
  }
  const { status } = response;
  const code = status === 503 || status === 504 ? NO_JSON : "";
  const words = t("The server answered with status {status}.", { status });
  return new ServerError(words, status, code, retryAfter);
}

/** Read Retry-After: seconds, or a date. */
function secondsOf(value: string | null): number | undefined {
  if (!value) return undefined;
  const seconds = Number(value);
  const wait = Number.isNaN(seconds) ? (Date.parse(value) - Date.now()) / 1000 : seconds;
  return Number.isNaN(wait) ? undefined : Math.max(0, wait);
}
