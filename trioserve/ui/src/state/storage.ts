// The state of the browser's storage.

import { signal, type ReadonlySignal } from "@preact/signals";

import type { StorageStatus } from "../types";

export { place } from "./place";

const status = signal<StorageStatus>("kept");

/** The state of storage; a notice tells if chats are not kept. */
export const storage: ReadonlySignal<StorageStatus> = status;

/** The browser refuses to keep anything. */
export function noteBlocked(): void {
  status.value = "memory";
}

/** Something could not be kept, for this error. */
export function noteUnkept(error: unknown): void {
  const name = (error as { name?: unknown } | null)?.name;
  if (name !== "QuotaExceededError" && name !== "NS_ERROR_DOM_QUOTA_REACHED") return noteBlocked();
  if (status.peek() === "kept") status.value = "full";
}

/** There is room again. */
export function noteKept(): void {
  if (status.peek() === "full") status.value = "kept";
}
