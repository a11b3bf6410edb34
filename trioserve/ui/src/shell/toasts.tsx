/** Short messages at the edge of the screen, which go by themselves. */

import { signal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Icon } from "../icon";
import { ServerError } from "../server/api";
import { retryNow, server } from "../state/server";
import { t } from "../words";
import { focusAgain } from "./view";

/** Milliseconds that a toast is shown. One with a button, or about a failure, stays longer. */
const BRIEF = 4000;
const LONG = 10_000;

interface Toast {
  id: number;
  text: string;
  failure: boolean;
  action?: { label: string; run: () => void | Promise<void> };
}

const toasts = signal<Toast[]>([]);
let last = 0;

/** Say something; `action` is offered beside it. What is returned takes it back. */
export function say(text: string, action?: Toast["action"]): () => void {
  return add({ text, failure: false, action });
}

/** Do something, and report a failure. */
export async function attempt(work: () => unknown): Promise<void> {
  try {
    await work();
  } catch (error) {
    if (error instanceof ServerError && error.reason === "network") {
      retryNow(); // a notice says that the server is lost, and when it is back
      if (server.peek().state === "unreachable") return;
    }
    add({ text: error instanceof Error ? error.message : String(error), failure: true });
  }
}

function add(toast: Omit<Toast, "id">): () => void {
  const id = ++last;
  const others = toasts.value.filter(({ text, failure }) => !(failure && toast.failure && text === toast.text));
  toasts.value = [...others.slice(-2), { ...toast, id }];
  return () => drop(id);
}

function drop(id: number): void {
  toasts.value = toasts.value.filter((toast) => toast.id !== id);
}

/** The messages that are shown now. */
export function Toasts(): VNode {
  return (
    <div class="toasts" role="status">
      {toasts.value.map((toast) => (
        <Shown key={toast.id} toast={toast} />
      ))}
    </div>
  );
}

function Shown({ toast }: { toast: Toast }): VNode {
  const [held, hold] = useState(false);
  const { id, text, failure, action } = toast;
  useEffect(() => {
    if (held) return undefined;
    const timer = setTimeout(() => drop(id), action || failure ? LONG : BRIEF);
    return () => clearTimeout(timer);
  }, [held]);
  const press = () => {
    drop(id);
    focusAgain();
    void attempt(() => action?.run());
  };
  return (
    <div
      class={failure ? "toast failure" : "toast"}
      onMouseEnter={() => hold(true)}
      onMouseLeave={() => hold(false)}
      onFocusIn={() => hold(true)}
      onFocusOut={() => hold(false)}
    >
      <span>{text}</span>
      {action && (
        <button type="button" class="button" onClick={press}>
          {action.label}
        </button>
      )}
      <button type="button" class="icon-button" aria-label={t("Dismiss")} onClick={() => drop(id)}>
        <Icon name="close" />
      </button>
    </div>
  );
}
