// Asks a worker for the colours of code, one question at a time.

import type { Line } from "./highlightCode";
import type { Question, Reply } from "./highlightWorker";

/** Longer code stays plain. */
const MAX_CODE = 60_000;
/** A question that takes longer ends the worker. */
const PATIENCE_MS = 5000;

let worker: Promise<Worker> | null = null;
let queue: Promise<unknown> = Promise.resolve();

/** The lines of a text in a language; null: it stays plain. */
export function highlight(code: string, language: string): Promise<Line[] | null> {
  if (code.length > MAX_CODE || !language) return Promise.resolve(null);
  const answer = queue.then(() => ask({ code, language }));
  queue = answer;
  return answer;
}

async function ask(question: Question): Promise<Line[] | null> {
  let running: Worker;
  try {
    worker ??= start();
    running = await worker;
  } catch (error) {
    // Without a worker, as where the network has gone, code is shown plain; the next block tries again.
    console.warn("Code is shown without colours:", error);
    worker = null;
    return null;
  }
  return new Promise((resolve) => {
    const done = (lines: Line[] | null) => {
      clearTimeout(timer);
      running.onmessage = running.onerror = null;
      resolve(lines);
    };
    const giveUp = () => {
      running.terminate();
      worker = null;
      done(null);
    };
    const timer = setTimeout(giveUp, PATIENCE_MS);
    running.onmessage = (event: MessageEvent<Reply>) => done(event.data === "ready" ? null : event.data);
    running.onerror = giveUp;
    running.postMessage(question);
  });
}

async function start(): Promise<Worker> {
  const { url } = await import("./highlightWorker");
  const started = new Worker(trusted(url) as string, { type: "module" });
  await new Promise<void>((resolve, reject) => {
    started.onmessage = () => resolve();
    started.onerror = (event) => reject(new Error(event.message || "the worker did not start"));
  });
  return started;
}

interface TrustedTypes {
  createPolicy(name: string, rules: { createScriptURL(url: string): string }): {
    createScriptURL(url: string): unknown;
  };
}

const types = (globalThis as { trustedTypes?: TrustedTypes }).trustedTypes;
/** Made once: the server's policy takes no second one of a name. */
const policy = types?.createPolicy("worker", { createScriptURL: (own) => own });

/** The page's policy lets no text become a script; the address of this page's own module may. */
function trusted(url: string): unknown {
  return policy ? policy.createScriptURL(url) : url;
}
