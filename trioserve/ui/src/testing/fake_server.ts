// A server in the place of `fetch`: streams that outlive their connections, which a test can cut.

const encoder = new TextEncoder();

/** The answer on one connection. */
export interface Reply {
  status?: number;
  headers?: Record<string, string>;
  body?: unknown;
  /** Bytes of the stream after which the connection breaks. */
  cutAfter?: number;
  /** The request arrives, but the connection breaks before there is an answer. */
  isLost?: boolean;
  /** The network is away: the request does not arrive. */
  isAway?: boolean;
}

export interface Asked {
  method: string;
  path: string;
  query: URLSearchParams;
  headers: Headers;
  body: any;
}

class Session {
  bytes = new Uint8Array(0);
  isDone = false;
  start = 0;
  onMore: (() => void)[] = [];

  add(text: string): void {
    const more = encoder.encode(text);
    const all = new Uint8Array(this.bytes.length + more.length);
    all.set(this.bytes);
    all.set(more, this.bytes.length);
    this.bytes = all;
    this.#tell();
  }

  /** Add an event with the offset after it as its id. */
  event(data: string): void {
    const body = `data: ${data}\n`;
    let offset = this.bytes.length + encoder.encode(body).length;
    const idLength = (digits: number) => "id: ".length + digits + 2;
    let digits = 1;
    while (String(offset + idLength(digits)).length > digits) digits += 1;
    offset += idLength(digits);
    this.add(`${body}id: ${offset}\n\n`);
  }

  end(): void {
    this.isDone = true;
    this.#tell();
  }

  #tell(): void {
    for (const tell of this.onMore.splice(0)) tell();
  }
}

export class FakeServer {
  readonly sessions = new Map<string, Session>();
  readonly asked: Asked[] = [];
  /**
   * The answers on the next connections, by "POST /v1/chat/completions" and the like; then all is well.
   */
  readonly replies = new Map<string, Reply[]>();
  /** Answers to other routes. */
  readonly routes = new Map<string, (asked: Asked) => Reply>();
  /** Cuts a chunk of bytes. */
  chunkSize = (): number => 1 << 20;
  /** Called for each new session, to fill it. */
  onSession: (session: Session, asked: Asked) => void = () => undefined;

  install(): void {
    globalThis.fetch = (url, options) => this.#fetch(String(url), options ?? {});
  }

  next(route: string, ...replies: Reply[]): void {
    this.replies.set(route, [...(this.replies.get(route) ?? []), ...replies]);
  }

  count(route: string): number {
    return this.asked.filter(({ method, path }) => `${method} ${path}` === route).length;
  }

  async #fetch(url: string, options: RequestInit): Promise<Response> {
    const { pathname, searchParams: query } = new URL(url);
    const path = pathname.replace(/^\/prefix/, "");
    if (path === pathname) throw new Error(`${url} lies outside of the prefix`);
    const method = options.method ?? "GET";
    const body = options.body ? JSON.parse(options.body as string) : undefined;
    const asked = { method, path, query, headers: new Headers(options.headers), body };
    this.asked.push(asked);
    await new Promise((resolve) => setImmediate(resolve));
    options.signal?.throwIfAborted();
    const reply = this.replies.get(`${method} ${path}`)?.shift() ?? {};
    if (reply.isAway) throw new TypeError("fetch failed");
    const response = reply.status ? simple(reply) : this.#answer(asked, reply, options.signal);
    if (reply.isLost) throw new TypeError("fetch failed");
    return response;
  }

  #answer(asked: Asked, reply: Reply, signal?: AbortSignal | null): Response {
    const route = `${asked.method} ${asked.path}`;
    const conversation = asked.query.get("conv_id") ?? "";
    if (route === "POST /v1/chat/completions") {
      const session = new Session();
      this.sessions.set(asked.headers.get("X-Conversation-Id")!, session);
      this.onSession(session, asked);
      return this.#stream(session, 0, reply, signal);
    }
    if (route === "GET /v1/stream") {
      const session = this.sessions.get(conversation);
      if (!session) return failure(404, "There is no such stream.");
      const from = Number(asked.query.get("from"));
      if (from < session.start) return failure(400, "The stream no longer has this offset.");
      return this.#stream(session, from, reply, signal);
    }
    if (route === "DELETE /v1/stream") {
      this.sessions.get(conversation)?.event('{"error":{"message":"stopped","code":500}}');
      this.sessions.get(conversation)?.end();
      this.sessions.delete(conversation);
      return new Response(null, { status: 204 });
    }
    if (route === "POST /v1/streams/lookup") {
      const ids = (asked.body.conversation_ids as string[]).filter((id) => this.sessions.has(id));
      return Response.json(ids.map((id) => ({ conversation_id: id, is_done: false })));
    }
    const other = this.routes.get(route);
    return other ? simple(other(asked)) : failure(404, "File Not Found");
  }

  #stream(session: Session, from: number, reply: Reply, signal?: AbortSignal | null): Response {
    let at = from;
    const limit = from + (reply.cutAfter ?? Infinity);
    const { chunkSize } = this;
    const body = new ReadableStream<Uint8Array>({
      async pull(controller) {
        while (at >= session.bytes.length && !session.isDone && at < limit) {
          await new Promise<void>((resolve, reject) => {
            session.onMore.push(resolve);
            signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
          });
        }
        if (at >= limit) throw new TypeError("the connection was cut");
        const end = Math.min(session.bytes.length, limit, at + Math.max(1, chunkSize()));
        if (end > at) controller.enqueue(session.bytes.slice(at, end));
        else controller.close();
        at = end;
      },
    });
    return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
  }
}

function simple({ status = 200, headers = {}, body }: Reply): Response {
  return Response.json(body ?? null, { status, headers });
}

function failure(status: number, message: string): Response {
  return Response.json({ error: { message, code: status } }, { status });
}

/** The chunk of a piece of text. */
export function delta(fields: Record<string, unknown>, finish: string | null = null): string {
  return JSON.stringify({ choices: [{ index: 0, delta: fields, finish_reason: finish }] });
}

/** Fill a session with a whole answer. */
export function answered(session: Session, pieces: readonly string[]): void {
  session.event(delta({ role: "assistant", content: null }));
  for (const piece of pieces) session.event(delta({ content: piece }));
  const timings = { cache_n: 2, prompt_n: 5, predicted_n: pieces.length, predicted_per_second: 50 };
  session.event(JSON.stringify({ ...JSON.parse(delta({}, "stop")), timings }));
  session.add("data: [DONE]\n\n");
  session.end();
}

/** The chunk of what happens with a tool; the answer is called chatcmpl-1. */
export function toolEvent(type: string, fields: Record<string, unknown> = {}): string {
  const choices = [{ index: 0, delta: {}, finish_reason: null }];
  return JSON.stringify({ id: "chatcmpl-1", choices, trioserve_event: { type, id: 1, ...fields } });
}

/** The events of a call of a tool: it is written, runs, and has a result. */
export function toolRun(call: string, tool: string, written: string, content: string): string[] {
  const of = { call_id: call };
  return [
    toolEvent("call", { ...of, step: 1, tool, kind: "server", display_name: `The ${tool}`, arguments: written, writes: false }),
    toolEvent("started", of),
    toolEvent("result", { ...of, content, is_error: false, diff: null, seconds: 0.25, stopped: false }),
  ];
}
