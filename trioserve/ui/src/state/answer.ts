// An answer while it is written: the events of its stream, put together.

import type { Message, Phase, Run, Stats, StreamPlace, ToolCall } from "../types";
import { isRecord } from "./json";

interface Timings {
  cache_n: number;
  prompt_n: number;
  predicted_n: number;
  predicted_per_second: number;
}

/** How much of the last seconds the speed is taken from, in milliseconds. */
const WINDOW = 3_000;

/** Takes the chunks of one stream. What it holds is always that of the bytes up to `offset`. */
export class Answer {
  offset: number;
  phase: Phase;
  place: Run["place"];
  progress: Run["progress"];
  note: string | undefined;
  finish: string | undefined;

  #content: string;
  #reasoning: string;
  #calls: ToolCall[];
  readonly #base: Message;
  readonly #stream: StreamPlace;
  #ttft: number | undefined;
  #timings: Timings | null = null;
  #prompt = { total: 0, cached: 0 };
  #count = { tokens: 0, firstAt: 0, lastAt: 0 };
  #arrivals: number[] = [];

  constructor(message: Message & { stream: StreamPlace }) {
    this.#base = message;
    this.#stream = message.stream;
    this.#content = message.content;
    this.#reasoning = message.reasoning;
    this.#calls = message.toolCalls;
    this.offset = message.stream.offset;
    this.#ttft = message.stream.ttft;
    this.phase = "sending";
  }

  /** Take an event; true: there is more to show of the message. */
  take(chunk: Record<string, unknown>, offset: number, now = Date.now()): boolean {
    this.offset = offset;
    if (isRecord(chunk.timings)) this.#timings = chunk.timings as unknown as Timings;
    if (isRecord(chunk.prompt_progress)) this.#takeProgress(chunk.prompt_progress);
    const choice = (chunk.choices as unknown[] | undefined)?.[0];
    if (!isRecord(choice)) return false;
    if (typeof choice.finish_reason === "string") this.finish = choice.finish_reason;
    return isRecord(choice.delta) && this.#takeDelta(choice.delta, now);
  }

  /** Take a comment: the place in the queue, or how far the model is loaded. */
  comment(text: string): void {
    const queued = /^queued, position (\d+)(?:, about ([\d.]+) s)?/.exec(text);
    const waiting = /^waiting for the model, position (\d+)/.exec(text);
    const loading = /^(loading|downloading) the model(?:, (\d+)%)?/.exec(text);
    const position = queued ?? waiting;
    if (!position && !loading) return;
    this.phase = queued ? "queued" : "loading-model";
    this.place = position ? { position: Number(position[1]) } : undefined;
    if (this.place && queued?.[2]) this.place.waitS = Number(queued[2]);
    this.note = loading ? said(loading[1]!, loading[2]) : undefined;
  }

  /** Tokens a second of late, roughly: the server sends a token an event unless it is hurried. */
  speed(now = Date.now()): number | undefined {
    const first = this.#arrivals.findIndex((at) => at >= now - WINDOW);
    this.#arrivals.splice(0, first < 0 ? this.#arrivals.length : first);
    const span = now - (this.#arrivals[0] ?? now);
    return span > 300 ? ((this.#arrivals.length - 1) / span) * 1000 : undefined;
  }

  /** A connection was lost: what comes now in a burst says nothing of the speed. */
  interrupted(): void {
    this.#arrivals = [];
  }

  /** The message as it is now. */
  message(contextSize: number): Message {
    const stats = this.#stats(contextSize);
    const { ttft: _, ...stream } = this.#stream;
    const ttft = this.#ttft === undefined ? {} : { ttft: this.#ttft };
    return {
      ...this.#base,
      content: this.#content,
      reasoning: this.#reasoning,
      toolCalls: this.#calls,
      stream: { ...stream, ...ttft, offset: this.offset },
      ...(this.finish ? { finish: this.finish } : {}),
      ...(stats ? { stats } : {}),
    };
  }

  #takeProgress(given: Record<string, unknown>): void {
    if (this.#count.tokens > 0) return;
    const { processed = 0, total = 0, cache = 0 } = given as Record<string, number>;
    this.phase = "prompt";
    this.place = this.note = undefined;
    this.progress = { done: processed, total, cached: cache };
    this.#prompt = { total, cached: cache };
  }

  #takeDelta(delta: Record<string, unknown>, now: number): boolean {
    const { content, reasoning_content: reasoning, tool_calls: calls } = delta;
    const hasText = typeof content === "string" && content !== "";
    const hasThought = typeof reasoning === "string" && reasoning !== "";
    const hasCalls = Array.isArray(calls) && calls.length > 0;
    if (!hasText && !hasThought && !hasCalls) return false;
    this.#countToken(now);
    this.phase = hasThought ? "thinking" : "writing";
    this.place = this.progress = this.note = undefined;
    if (hasThought) this.#reasoning += reasoning;
    if (hasText) this.#content += content;
    if (hasCalls) this.#calls = withCalls(this.#calls, calls);
    return true;
  }

  #countToken(now: number): void {
    this.#ttft ??= Math.max(0, now - this.#stream.startedAt);
    this.#count.firstAt ||= now;
    this.#count.lastAt = now;
    this.#count.tokens += 1;
    this.#arrivals.push(now);
  }

  /**
   * By the server's count, which comes at the end; of an answer that was stopped, by ours, if we
   * saw all of it.
   */
  #stats(contextSize: number): Stats | undefined {
    const { tokens, firstAt, lastAt } = this.#count;
    const sawAll = this.#stream.offset === 0 && tokens > 0;
    const timings = this.#timings ?? (sawAll ? this.#ownTimings(tokens, lastAt - firstAt) : null);
    if (!timings) return undefined;
    const promptTokens = timings.cache_n + timings.prompt_n;
    return {
      tokens: timings.predicted_n,
      tokensPerSecond: timings.predicted_per_second,
      ttft: this.#ttft ?? 0,
      promptTokens,
      cachedTokens: timings.cache_n,
      contextUsed: promptTokens + timings.predicted_n,
      contextSize,
    };
  }

  #ownTimings(tokens: number, time: number): Timings {
    const { total, cached } = this.#prompt;
    return {
      cache_n: cached,
      prompt_n: total - cached,
      predicted_n: tokens,
      predicted_per_second: time > 0 ? ((tokens - 1) / time) * 1000 : 0,
    };
  }
}

function said(what: string, percent: string | undefined): string {
  const words = what === "loading" ? "Loading the model" : "Downloading the model";
  return percent ? `${words}, ${percent}%` : words;
}

/** Fragments of calls, each with the number of its call. */
function withCalls(before: readonly ToolCall[], fragments: unknown[]): ToolCall[] {
  const calls = [...before];
  for (const fragment of fragments) {
    if (!isRecord(fragment)) continue;
    const given = typeof fragment.index === "number" ? fragment.index : calls.length;
    const index = Math.min(given, calls.length);
    const { name, arguments: more } = isRecord(fragment.function) ? fragment.function : {};
    const call = calls[index] ?? { id: "", name: "", arguments: "" };
    calls[index] = {
      id: typeof fragment.id === "string" ? fragment.id : call.id,
      name: typeof name === "string" ? name : call.name,
      arguments: call.arguments + (typeof more === "string" ? more : ""),
    };
  }
  return calls;
}
