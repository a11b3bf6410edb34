// Follows one answer: its text to the screen each frame, and to the database now and then.

import { follow, stopStream, type End, type Listener } from "../server/follow";
import type { ServerError } from "../server/api";
import type { Message, Phase, Run, StreamPlace } from "../types";
import { t } from "../words";
import { Answer } from "./answer";
import { keepAnswer } from "./db";
import { UnreadableError } from "./media";
import { withPlace } from "./places";
import { contextSizeOf, noteAnswer, noteTrouble, noteWorks } from "./server";
import { endLive, showLive } from "./shown";
import { askedIn, lengthOf } from "./steps";
import { tellChanged, tellWritten } from "./tabs";
import { decide, isAllowed } from "./tools";

/** An answer that has yet to come. */
export type Unwritten = Message & { stream: StreamPlace };

/** Makes what the server is sent, once it is time to. */
export type Body = () => Promise<Record<string, unknown>>;

/** Milliseconds between two frames when the browser draws none, because the page is hidden. */
const UNSEEN_FRAME = 250;

/** Milliseconds between two looks at the speed. */
const SPEED_INTERVAL = 500;

/**
 * Milliseconds between two saves, and how many more a character adds: long answers are saved less
 * often.
 */
const SAVE_INTERVAL = 1_000;
const SAVE_PER_CHARACTER = 0.01;

export class Writer implements Listener {
  readonly #message: Unwritten;
  readonly #answer: Answer;
  readonly #abort = new AbortController();
  readonly #onRun: (run: Run | null) => void;
  #trouble: { phase: Phase; note: string | undefined } | null = null;
  #speed: { value: number | undefined; at: number } = { value: undefined, at: 0 };
  #hasText = false;
  #isDrawing = false;
  #isSaving = false;
  /** The calls that a person has been asked about. */
  readonly #asked = new Set<string>();
  #hasEnded = false;
  #savedAt = Date.now();

  /** The database has the message. `onRun` gets its progress; null: it has ended. */
  constructor(message: Unwritten, onRun: (run: Run | null) => void) {
    this.#message = message;
    this.#answer = new Answer(message);
    this.#onRun = onRun;
  }

  get chat(): string {
    return this.#message.chat;
  }

  /** Follow the answer to its end, whatever that is. With a body, ask for it first. */
  async run(body?: Body): Promise<void> {
    const { conversation, offset } = this.#message.stream;
    const { signal } = this.#abort;
    const ask = async () => {
      const asked = body ? { body: await body() } : {};
      return follow({ conversation, offset, ...asked }, this, signal);
    };
    const wait = () => this.#setTrouble("queued", t("Waiting until another answer is complete…"));
    showLive(this.#message);
    this.#tellRun();
    this.#ask(this.#message);
    try {
      const end = await withPlace(ask, wait, signal);
      await this.#end(outcome(end, this.#answer));
    } catch (error) {
      if (signal.aborted) return; // who did that has ended it
      if (error instanceof UnreadableError) return await this.#end({ state: "failed", error: error.message });
      await this.#end({ state: "failed", error: t("The page failed. The browser’s console has more.") });
      throw error;
    }
  }

  /** End the answer here and on the server. */
  async stop(): Promise<void> {
    this.#abort.abort();
    void stopStream(this.#message.stream.conversation);
    await this.#end({ state: "stopped" });
  }

  onChunk(chunk: Record<string, unknown>, offset: number): void {
    const isFirst = this.#answer.take(chunk, offset) && !this.#hasText;
    if (isFirst) noteAnswer(this.#message.model);
    this.#hasText ||= isFirst;
    this.#draw();
  }

  onComment(text: string): void {
    this.#answer.comment(text);
    this.#draw();
  }

  onConnected(): void {
    noteWorks();
    this.#trouble = null;
    this.#draw();
  }

  onWaiting(error: ServerError, retryAt: number): void {
    noteTrouble(error, retryAt);
    const says = error.message.replace(/[^.!?…]$/, "$&."); // what the server says need not end in a stop
    if (error.reason === "loading") this.#setTrouble("loading-model");
    else if (error.reason === "full") this.#setTrouble("queued", t("{says} Trying again…", { says }));
    else this.#setTrouble("reconnecting", t("{says} Connecting again…", { says }));
  }

  #setTrouble(phase: Phase, note?: string): void {
    this.#trouble = { phase, note };
    this.#tellRun();
  }

  /** Have the next frame show the received part. */
  #draw(): void {
    if (this.#isDrawing || this.#hasEnded) return;
    this.#isDrawing = true;
    const draw = () => {
      if (!this.#isDrawing) return; // the other of the two was first
      this.#isDrawing = false;
      clearTimeout(timer);
      if (!this.#hasEnded) this.#show();
    };
    const timer = setTimeout(draw, UNSEEN_FRAME);
    globalThis.requestAnimationFrame?.(draw);
  }

  #show(): void {
    const message = this.#answer.message(contextSizeOf(this.#message.model));
    showLive(message);
    this.#tellRun();
    const length = message.content.length + message.reasoning.length + lengthOf(message.steps);
    const due = this.#savedAt + SAVE_INTERVAL + length * SAVE_PER_CHARACTER;
    const asksAnew = this.#ask(message);
    if (!this.#isSaving && (asksAnew || Date.now() >= due)) void this.#save(message);
  }

  /** Let calls through that need no person; true: there are others, which other tabs have to show as well. */
  #ask(message: Message): boolean {
    const asked = askedIn(message.steps).filter(({ id }) => !this.#asked.has(id));
    for (const { id } of asked) this.#asked.add(id);
    const [allowed, others] = [true, false].map((is) => asked.filter(({ name }) => isAllowed(message.chat, name) === is));
    for (const { id } of allowed!) void decide(message.stream?.id, id, true).catch(() => undefined); // the person is asked
    return others!.length > 0;
  }

  async #save(message: Message): Promise<void> {
    this.#isSaving = true;
    const kept = await this.#keep(message);
    this.#isSaving = false;
    this.#savedAt = Date.now();
    // Another tab has stopped it, or deleted the chat.
    if (kept !== message && !this.#hasEnded) this.#close(kept);
  }

  async #keep(message: Message): Promise<Message | null> {
    const kept = await keepAnswer(message, this.#message.stream.conversation);
    if (message.state === "writing") tellWritten();
    else tellChanged(message.chat);
    return kept;
  }

  async #end(how: Partial<Message>): Promise<void> {
    if (this.#hasEnded) return;
    this.#hasEnded = true;
    const { stream: _, ...message } = this.#answer.message(contextSizeOf(this.#message.model));
    const ended = { ...message, ...how };
    this.#close(await this.#keep(ended as Message));
  }

  /** Show how it has ended; null: it was deleted. */
  #close(message: Message | null): void {
    this.#hasEnded = true;
    if (!this.#abort.signal.aborted) this.#abort.abort();
    if (message === null) void stopStream(this.#message.stream.conversation);
    endLive(message ?? { ...this.#message, state: "stopped" });
    this.#onRun(null);
  }

  #tellRun(): void {
    if (this.#hasEnded) return;
    const { place, progress } = this.#answer;
    const { phase, note } = this.#trouble ?? this.#answer;
    const now = Date.now();
    if (now - this.#speed.at >= SPEED_INTERVAL) {
      this.#speed = { value: this.#answer.speed, at: now };
    }
    const speed = this.#speed.value;
    this.#onRun({
      chat: this.#message.chat,
      message: this.#message.id,
      startedAt: this.#message.stream.startedAt,
      phase,
      ...(place ? { place } : {}),
      ...(progress ? { progress } : {}),
      ...(speed === undefined ? {} : { tokensPerSecond: speed }),
      ...(note ? { note } : {}),
    });
  }
}

/** The changes of a message at this end. */
function outcome(end: End, { offset, finish }: Answer): Partial<Message> {
  if (end.kind !== "failed" && finish) return { state: "done" }; // only the last line is missing
  switch (end.kind) {
    case "complete":
      return { state: "done" };
    case "failed":
      return { state: "failed", error: end.error.message, ...(end.error.reason === "context" ? { full: true } : {}) };
    case "lost":
      return { state: "failed", error: t(offset > 0 ? LOST : NEVER_CAME) };
    case "gap":
      return { state: "failed", error: t(GAP) };
  }
}

const LOST =
  "The server no longer has this answer. It was restarted, or the page was away for too long.";
const NEVER_CAME =
  "The server does not know this question. It was restarted, or the page was closed too soon.";
const GAP = "The page was away for too long: the server has dropped what comes next.";
