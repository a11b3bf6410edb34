// This module is two things: imported by the page, it tells its own address; run in a worker, it colours code.
// So a text that takes a grammar for ever holds up nothing but the worker, which is then ended.

import type { Line } from "./highlightCode";

export interface Question {
  code: string;
  language: string;
}

/** "ready" comes first, once the grammars are there; then the lines of one question after the other. */
export type Reply = "ready" | Line[] | null;

/** What to start the worker with. */
export const url: string = import.meta.url;

async function serve(): Promise<void> {
  const { highlightCode } = await import("./highlightCode");
  self.addEventListener("message", (event: MessageEvent<Question>) => {
    reply(highlightCode(event.data.code, event.data.language));
  });
  reply("ready");
}

function reply(lines: Reply): void {
  self.postMessage(lines);
}

if (typeof document === "undefined" && "WorkerGlobalScope" in globalThis) void serve();
