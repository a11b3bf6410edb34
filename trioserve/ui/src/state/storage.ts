// Whether the browser keeps what it is given.

import { signal, type ReadonlySignal } from "@preact/signals";

import type { StorageStatus } from "../types";
import { t } from "../words";

export { place } from "./place";

const status = signal<StorageStatus>({ state: "kept", message: "" });

/** Where chats are kept; something for a notice when they are not. */
export const storage: ReadonlySignal<StorageStatus> = status;

/** The browser refuses to keep anything. */
export function noteBlocked(): void {
  status.value = {
    state: "memory",
    message: t("This browser window keeps no data: chats are gone when it is closed."),
  };
}

/** Something could not be kept, for this error. */
export function noteUnkept(error: unknown): void {
  const name = (error as { name?: unknown } | null)?.name;
  if (name !== "QuotaExceededError" && name !== "NS_ERROR_DOM_QUOTA_REACHED") return noteBlocked();
  if (status.peek().state !== "kept") return;
  status.value = {
    state: "full",
    message: t("The browser’s storage is full: what is new is not kept. Export or delete some chats."),
  };
}

/** There is room again. */
export function noteKept(): void {
  if (status.peek().state === "full") status.value = { state: "kept", message: "" };
}
