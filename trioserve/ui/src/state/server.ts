// What the server is, and what it does.

import { signal, type ReadonlySignal } from "@preact/signals";

import type { Activity, Model, Props, ServerStatus } from "../types";

export const server: ReadonlySignal<ServerStatus> = signal({ state: "connecting", message: "" });

/** Of the chosen model; null until the server has said. */
export const props: ReadonlySignal<Props | null> = signal(null);

export const models: ReadonlySignal<Model[]> = signal([]);

export const activity: ReadonlySignal<Activity | null> = signal(null);

/** Keep looking at what the server does, until the function that is returned is called. */
export function watchActivity(): () => void {
  throw new Error("not yet");
}

/** Look again at once, as a person asks for it. */
export function retryNow(): void {
  throw new Error("not yet");
}
