// Several tabs of the page share one database. They tell each other what has changed, and ask who
// follows an answer.

import type { Run } from "../types";
import { newId } from "./ids";
import { place } from "./storage";

type Note =
  | { kind: "changed"; chat: string }
  | { kind: "written" }
  | { kind: "run"; run: Run }
  | { kind: "who"; message: string; asked: string }
  | { kind: "me"; asked: string }
  | { kind: "reading" }
  | { kind: "bye" };

/** Milliseconds in which another tab says that it follows an answer. One that sleeps does not. */
const PATIENCE = 400;

let channel: BroadcastChannel | null = null;
const questions = new Map<string, () => void>();

export interface Ears {
  /** Another tab has changed a chat, deleted it or added it. */
  onChanged(chat: string): void;
  /** Another tab has saved more of an answer. */
  onWritten(): void;
  /** Progress of an answer that another tab follows. */
  onRun(run: Run): void;
  /** A tab has been closed: its answers are followed by no tab. */
  onBye(): void;
  /** Another tab reads an answer aloud from now on. */
  onReading(): void;
  /** True if this tab follows an answer. */
  isFollowing(message: string): boolean;
  /** Its progress. */
  runOf(message: string): Run | undefined;
}

/** Begin to listen to the other tabs. */
export function startTabs(ears: Ears): void {
  if (typeof BroadcastChannel === "undefined") return;
  channel = new BroadcastChannel(place("tabs"));
  channel.onmessage = ({ data }: MessageEvent<Note>) => {
    if (data.kind === "changed") ears.onChanged(data.chat);
    else if (data.kind === "written") ears.onWritten();
    else if (data.kind === "run") ears.onRun(data.run);
    else if (data.kind === "bye") ears.onBye();
    else if (data.kind === "reading") ears.onReading();
    else if (data.kind === "me") questions.get(data.asked)?.();
    else if (ears.isFollowing(data.message)) {
      tell({ kind: "me", asked: data.asked });
      const run = ears.runOf(data.message);
      if (run) tellRun(run);
    }
  };
  globalThis.addEventListener?.("pagehide", () => tell({ kind: "bye" }));
}

/** Stop listening. */
export function endTabs(): void {
  channel?.close();
  channel = null;
}

/** Tell the other tabs that a chat has changed. */
export function tellChanged(chat: string): void {
  tell({ kind: "changed", chat });
}

/** Tell the other tabs that there is more of an answer. */
export function tellWritten(): void {
  tell({ kind: "written" });
}

/** Tell the other tabs how an answer goes that this one follows. */
export function tellRun(run: Run): void {
  tell({ kind: "run", run });
}

/** Tell the other tabs that this one reads an answer aloud. */
export function tellReading(): void {
  tell({ kind: "reading" });
}

/** True if another tab follows an answer. */
export async function isFollowedElsewhere(message: string): Promise<boolean> {
  if (!channel) return false;
  const asked = newId();
  try {
    return await new Promise<boolean>((resolve) => {
      questions.set(asked, () => resolve(true));
      setTimeout(() => resolve(false), PATIENCE);
      tell({ kind: "who", message, asked });
    });
  } finally {
    questions.delete(asked);
  }
}

function tell(note: Note): void {
  channel?.postMessage(note);
}
