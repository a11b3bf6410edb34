// The browser's database.

import { signal, type ReadonlySignal } from "@preact/signals";

import type { StorageStatus } from "../types";

export const storage: ReadonlySignal<StorageStatus> = signal({ state: "kept", message: "" });
