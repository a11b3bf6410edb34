// The answer that is read aloud: one at most, in all tabs.

import { signal, type ReadonlySignal } from "@preact/signals";

import { tellReading } from "./tabs";

const reading = signal("");
let current = new AbortController();

/** The message that is being read aloud; empty: none. */
export const readAloud: ReadonlySignal<string> = reading;

/** A message is read from now on, and no other. The signal is aborted when that has to stop. */
export function beginReading(message: string): AbortSignal {
  stopReading();
  tellReading();
  reading.value = message;
  return current.signal;
}

/** Stop reading; false: nothing was being read. */
export function stopReading(): boolean {
  const wasReading = reading.peek() !== "";
  current.abort();
  current = new AbortController();
  reading.value = "";
  return wasReading;
}
