// Notices that a connection is dead without a sign of it: the machine slept, or the network changed.

import { onWake } from "./wake";

/**
 * Milliseconds between looks. By the clock on the wall: other timers stand still while a
 * machine sleeps.
 */
const LOOK = 2_000;

/** The greatest age of the last byte, in milliseconds, when the network or the person comes back. */
const STALE = 5_000;

/**
 * Aborts `signal` when what is expected does not come in time, or when the outer signal is
 * aborted.
 */
export class Watch {
  readonly #controller = new AbortController();
  readonly #timer: ReturnType<typeof setInterval>;
  readonly #endings: (() => void)[];
  #since = Date.now();
  #limit = Infinity;

  /** Whether to give up at once when the person comes back and the last byte is old. */
  isListening = false;

  constructor(outer: AbortSignal) {
    const abort = () => this.#controller.abort(outer.reason);
    if (outer.aborted) abort();
    outer.addEventListener("abort", abort);
    this.#timer = setInterval(() => this.#look(this.#limit), LOOK);
    const awake = onWake(() => this.#look(this.isListening ? STALE : this.#limit));
    this.#endings = [awake, () => outer.removeEventListener("abort", abort)];
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** Something came; the next must come within this many milliseconds. */
  expect(within: number): void {
    this.#since = Date.now();
    this.#limit = within;
  }

  end(): void {
    clearInterval(this.#timer);
    for (const end of this.#endings) end();
  }

  #look(limit: number): void {
    if (Date.now() - this.#since > limit) this.#controller.abort();
  }
}
