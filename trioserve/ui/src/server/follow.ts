// Follows an answer from the request to its last event, across lost connections.
//
// A POST with X-Conversation-Id begins it; the server then writes on whether we listen or not, and
// GET /v1/stream?conv_id=ID&from=OFFSET continues where a connection broke.

import { errorFrom, posting, request, requestJson, ServerError } from "./api";
import { SseParser } from "./sse";
import { pauseFor } from "./wake";
import { Watch } from "./watch";

export interface Following {
  conversation: string;
  /** The body of the POST; absent: the server should know the conversation already. */
  body?: Record<string, unknown>;
  /** Where to continue. */
  offset: number;
}

export interface Listener {
  /** An event, and how many bytes of the stream it completes. */
  onChunk(chunk: Record<string, unknown>, offset: number): void;
  onComment(text: string): void;
  /** The server has begun to answer, or continues. */
  onConnected(): void;
  /** There is no connection; `retryAt` is when the next is tried. */
  onWaiting(error: ServerError, retryAt: number): void;
}

export type End =
  | { kind: "complete" }
  | { kind: "failed"; error: ServerError }
  /** The server does not know the conversation any more. */
  | { kind: "lost" }
  /** It knows it, but not what came right after the offset. */
  | { kind: "gap" };

/** Seconds between the server's pings, which it is asked for. */
export const PING_S = 15;

/** Milliseconds without a byte after which a connection counts as lost. */
const SILENCE = 40_000;

/** Milliseconds between two attempts, unless the server asks for more. */
const FIRST_PAUSE = 250;
const LONGEST_PAUSE = 8_000;

/** The longest wait that the server may ask for, in milliseconds; for a longer one we tell the person. */
const LONGEST_ASKED = 120_000;

/** Follow an answer. Throws only what `signal` was aborted with. */
export async function follow(
  wanted: Following,
  listener: Listener,
  signal: AbortSignal,
): Promise<End> {
  const connection = new Connection(wanted, listener, signal);
  let pause = FIRST_PAUSE;
  for (;;) {
    const before = connection.offset;
    try {
      if (await connection.read()) return { kind: "complete" };
      throw new ServerError("The connection was closed.");
    } catch (error) {
      signal.throwIfAborted();
      const failure = asServerError(error);
      const end = connection.endBy(failure);
      if (end) return end;
      if (connection.offset > before) pause = FIRST_PAUSE;
      const wait = Math.max(failure.retryAfter ?? 0, pause * (0.75 + Math.random() / 2));
      listener.onWaiting(failure, Date.now() + wait);
      await pauseFor(wait, signal);
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    }
  }
}

/**
 * Tell the server to stop writing an answer. Tries again for about a minute: the network may be
 * away.
 */
export async function stopStream(conversation: string): Promise<void> {
  const path = `v1/stream?conv_id=${encodeURIComponent(conversation)}`;
  for (let pause = FIRST_PAUSE; pause < 64_000; pause *= 2) {
    try {
      await request(path, { method: "DELETE", keepalive: true });
      return;
    } catch (error) {
      if (!asServerError(error).passes) return; // the server knows nothing of it: then nothing runs
    }
    await pauseFor(pause);
  }
}

/** An error that no new attempt can help, whatever its status. */
class FinalError extends ServerError {}

class Connection {
  offset: number;
  /** True if the server may have the request: after a POST without an answer, or a reload. */
  #posted: "no" | "perhaps" | "yes";

  constructor(
    private readonly wanted: Following,
    private readonly listener: Listener,
    private readonly outer: AbortSignal,
  ) {
    this.offset = wanted.offset;
    this.#posted = wanted.body ? "no" : "perhaps";
  }

  /** Open a connection and read it to its end; true: the answer is complete. */
  async read(): Promise<boolean> {
    const watch = new Watch(this.outer);
    try {
      watch.expect(SILENCE);
      if (this.#posted === "perhaps") this.#posted = (await this.#isKnown(watch)) ? "yes" : "no";
      if (this.#posted === "no" && !this.wanted.body) throw new ServerError("It is unknown.", 404);
      const response = await this.#open(watch);
      this.listener.onConnected();
      return await this.#readBody(response, watch);
    } finally {
      watch.end();
    }
  }

  /** The end, if an error is one. */
  endBy(error: ServerError): End | null {
    if (error instanceof FinalError) return { kind: "failed", error };
    if (error.passes && (error.retryAfter ?? 0) <= LONGEST_ASKED) return null;
    const isReading = this.#posted === "yes" || !this.wanted.body;
    if (isReading && error.reason === "unknown") return { kind: "lost" };
    if (isReading && error.status === 400) return { kind: "gap" };
    return { kind: "failed", error };
  }

  async #isKnown(watch: Watch): Promise<boolean> {
    const body = { conversation_ids: [this.wanted.conversation] };
    const options = posting(body, { signal: watch.signal });
    return (await requestJson<unknown[]>("v1/streams/lookup", options)).length > 0;
  }

  async #open(watch: Watch): Promise<Response> {
    const { conversation, body } = this.wanted;
    if (this.#posted === "yes") {
      const id = encodeURIComponent(conversation);
      return request(`v1/stream?conv_id=${id}&from=${this.offset}`, { signal: watch.signal });
    }
    const headers = { "X-Conversation-Id": conversation };
    const options = posting(body, { headers, signal: watch.signal });
    watch.expect(SILENCE + (options.body as string).length / 10); // ten bytes a millisecond
    try {
      const response = await request("v1/chat/completions", options);
      this.#posted = "yes";
      return response;
    } catch (error) {
      this.#posted = asServerError(error).status === 0 ? "perhaps" : "no";
      throw error;
    }
  }

  async #readBody(response: Response, watch: Watch): Promise<boolean> {
    if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
      throw new FinalError("The server's answer is no stream.", response.status);
    }
    const reader = response.body!.getReader();
    const parser = new SseParser(this.offset);
    watch.isListening = true;
    try {
      for (;;) {
        watch.expect(SILENCE);
        const { done, value } = await reader.read();
        if (done) return false;
        if (this.#take(parser, value)) return true;
      }
    } finally {
      // The unread rest does not matter, nor does its error.
      reader.cancel().catch(() => undefined);
    }
  }

  #take(parser: SseParser, bytes: Uint8Array): boolean {
    for (const item of parser.push(bytes)) {
      if (item.kind === "comment") {
        this.listener.onComment(item.text);
        continue;
      }
      if (item.data === "[DONE]") return true;
      const chunk = parsed(item.data);
      const error = errorFrom(chunk, 500);
      if (error) throw new FinalError(error.message, error.status, error.code);
      this.offset = item.offset;
      this.listener.onChunk(chunk, item.offset);
    }
    return false;
  }
}

function parsed(data: string): Record<string, unknown> {
  try {
    return JSON.parse(data) as Record<string, unknown>;
  } catch {
    throw new FinalError("The server sent an event that is no JSON.", 200);
  }
}

/** Errors of reading a body are those of the network. */
function asServerError(error: unknown): ServerError {
  return error instanceof ServerError ? error : new ServerError("The connection was lost.");
}
