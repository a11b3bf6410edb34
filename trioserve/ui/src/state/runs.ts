// The answers that are being written.

import { signal, type ReadonlySignal } from "@preact/signals";

import type { Run } from "../types";

/** By the id of the chat. */
export const runs: ReadonlySignal<ReadonlyMap<string, Run>> = signal(new Map());
