// An answer while it is written: the events of its stream, put together.

import type { Message, Phase, Run, Stats, Step, StreamPlace, TokenOdds, ToolCall } from "../types";
import { t } from "../words";
import { isRecord } from "./json";
import { oddsIn } from "./odds";
import { lastIsAt, withCall, withChange, withText } from "./steps";

/** The server's counts, in each chunk that has text. Its clock knows nothing of slow networks. */
interface Timings {
  cache_n: number;
  prompt_n: number;
  predicted_n: number;
  predicted_ms: number;
  predicted_per_second: number;
}

/** The milliseconds that the speed is measured over, and those between two figures. */
const WINDOW = 3_000;
const STEP = 100;

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
  #steps: readonly Step[];
  readonly #odds: TokenOdds[];
  #isCalling: boolean;
  #id: string | undefined;
  readonly #base: Message;
  readonly #stream: StreamPlace;
  #ttft: number | undefined;
  #timings: Timings | null = null;
  /** Tokens of the last step. */
  #written = 0;
  #samples: Timings[] = [];

  constructor(message: Message & { stream: StreamPlace }) {
    this.#base = message;
    this.#stream = message.stream;
    this.#content = message.content;
    this.#reasoning = message.reasoning;
    this.#calls = message.toolCalls;
    this.#steps = message.steps ?? [];
    this.#odds = [...(message.odds ?? [])];
    this.#isCalling = message.stream.isCalling ?? false;
    this.#id = message.stream.id;
    this.offset = message.stream.offset;
    this.#ttft = message.stream.ttft;
    this.phase = "sending";
    if (this.#isCalling) ({ phase: this.phase, note: this.note } = lastIsAt(this.#steps));
  }

  /** Take an event; true: there is more to show of the message. */
  take(chunk: Record<string, unknown>, offset: number, now = Date.now()): boolean {
    this.offset = offset;
    if (typeof chunk.id === "string") this.#id = chunk.id;
    if (isRecord(chunk.trioserve_event)) return this.#takeEvent(chunk.trioserve_event);
    const choice = (chunk.choices as unknown[] | undefined)?.[0];
    if (isRecord(chunk.timings)) {
      this.#takeTimings(chunk.timings as unknown as Timings);
      // At the end, the total of all steps arrives.
      const isSum = this.#steps.length > 0 && isRecord(choice) && choice.finish_reason !== null;
      if (!isSum) this.#written = this.#timings?.predicted_n ?? 0;
    }
    if (isRecord(chunk.prompt_progress)) this.#takeProgress(chunk.prompt_progress);
    if (!isRecord(choice)) return false;
    if (isRecord(choice.logprobs)) this.#odds.push(...oddsIn(choice.logprobs));
    if (typeof choice.finish_reason === "string") this.finish ??= choice.finish_reason;
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

  /** Tokens a second of late. */
  get speed(): number | undefined {
    const [first] = this.#samples;
    const last = this.#timings;
    if (!first || !last || last.predicted_ms - first.predicted_ms < STEP) return undefined;
    const tokens = last.predicted_n - first.predicted_n;
    return (tokens / (last.predicted_ms - first.predicted_ms)) * 1000;
  }

  /** The message as it is now. */
  message(contextSize: number): Message {
    const stats = this.#stats(contextSize);
    const { conversation, startedAt } = this.#stream;
    return {
      ...this.#base,
      content: this.#content,
      reasoning: this.#reasoning,
      toolCalls: this.#calls,
      ...(this.#steps.length > 0 ? { steps: [...this.#steps] } : {}),
      ...(this.#odds.length > 0 ? { odds: [...this.#odds] } : {}),
      stream: {
        conversation,
        startedAt,
        offset: this.offset,
        ...(this.#ttft === undefined ? {} : { ttft: this.#ttft }),
        ...(this.#id ? { id: this.#id } : {}),
        ...(this.#isCalling ? { isCalling: true } : {}),
      },
      ...(this.finish ? { finish: this.finish } : {}),
      ...(stats ? { stats } : {}),
    };
  }

  #takeProgress(given: Record<string, unknown>): void {
    const { processed = 0, total = 0, cache = 0 } = given as Record<string, number>;
    this.phase = "prompt";
    this.place = this.note = undefined;
    this.progress = { done: processed, total, cached: cache };
  }

  #takeDelta(delta: Record<string, unknown>, now: number): boolean {
    const { content, reasoning_content: reasoning, tool_calls: calls } = delta;
    const hasText = typeof content === "string" && content !== "";
    const hasThought = typeof reasoning === "string" && reasoning !== "";
    const hasCalls = Array.isArray(calls) && calls.length > 0;
    if (!hasText && !hasThought && !hasCalls) return false;
    this.#ttft ??= Math.max(0, now - this.#stream.startedAt);
    this.#beginText(hasThought ? "thinking" : "writing");
    if (this.#isCalling) {
      this.#steps = withText(this.#steps, hasText ? content : "", hasThought ? reasoning : "");
    } else {
      if (hasThought) this.#reasoning += reasoning;
      if (hasText) this.#content += content;
    }
    if (hasCalls) this.#calls = withCalls(this.#calls, calls);
    return true;
  }

  #beginText(phase: Phase): void {
    this.phase = phase;
    this.place = this.progress = this.note = undefined;
  }

  /** Take the events of calls that the server makes. */
  #takeEvent(event: Record<string, unknown>): boolean {
    this.place = this.progress = this.note = undefined;
    switch (event.type) {
      case "step":
        this.#isCalling = false;
        this.#samples = []; // the server starts to count again
        this.phase = "prompt";
        return true;
      case "call":
        if (!this.#isCalling) this.#beginCalls();
        this.#steps = withCall(this.#steps, event);
        break;
      case "end":
        if (event.reason === "max_steps") this.finish = event.reason;
        return true;
      default:
        this.#steps = withChange(this.#steps, event);
    }
    ({ phase: this.phase, note: this.note } = lastIsAt(this.#steps));
    return true;
  }

  /** The text so far led to calls: the text after them is the next step. */
  #beginCalls(): void {
    this.#steps = [...this.#steps, { content: this.#content, reasoning: this.#reasoning, calls: [] }];
    this.#content = this.#reasoning = "";
    this.#isCalling = true;
  }

  #takeTimings(timings: Timings): void {
    if (!timings.predicted_n) return;
    // Events of a call that the server makes begin once it is complete.
    if (this.phase === "prompt") this.#beginText("writing");
    this.#timings = timings;
    const { predicted_ms: now } = timings;
    const last = this.#samples[this.#samples.length - 1];
    if (!last || now - last.predicted_ms >= STEP) this.#samples.push(timings);
    while (now - this.#samples[0]!.predicted_ms > WINDOW) this.#samples.shift();
  }

  #stats(contextSize: number): Stats | undefined {
    const timings = this.#timings;
    if (!timings) return undefined;
    const promptTokens = timings.cache_n + timings.prompt_n;
    return {
      tokens: timings.predicted_n,
      tokensPerSecond: timings.predicted_per_second,
      ttft: this.#ttft ?? 0,
      promptTokens,
      cachedTokens: timings.cache_n,
      contextUsed: promptTokens + this.#written,
      contextSize,
    };
  }
}

function said(what: string, percent: string | undefined): string {
  const words = what === "loading" ? t("Loading the model") : t("Downloading the model");
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
