// Asks a person about calls of the page's own tools, and shows that they are being made.

import type { VNode } from "preact";

import { attempt } from "../shell/toasts";
import { callsBeingMade, denyCalls, makeAlways, makeCalls, toolsOf } from "../state/calls";
import type { Message } from "../types";
import { t } from "../words";
import { exposed } from "./toolText";

/** The choices for the calls at the end of an answer. */
export function PageCalls({ message }: { message: Message }): VNode | null {
  const tools = toolsOf(message);
  if (!tools) return null;
  const running = callsBeingMade.value.get(message.id);
  const names = tools.map(({ title, origin }) => `${exposed(title)} (${exposed(origin)})`).join(", ");
  if (running) {
    return (
      <p class="buttons">
        <span class="shimmer">{t("Running {names}…", { names })}</span>
        <button type="button" class="button" onClick={() => running.abort()}>
          {t("Stop this")}
        </button>
      </p>
    );
  }
  const act = (work: (message: Message) => Promise<void>) => () => void attempt(() => work(message));
  return (
    <div class="approval" role="group" aria-label={t("Approval of {title}", { title: names })}>
      <p>{t("Allow this call of {names}?", { names })}</p>
      <span class="buttons">
        <button type="button" class="button primary allow" onClick={act(makeCalls)}>
          {t("Allow")}
        </button>
        <button type="button" class="button" onClick={act(makeAlways)}>
          {t("Always allow in this chat")}
        </button>
        <button type="button" class="button danger" onClick={act(denyCalls)}>
          {t("Deny")}
        </button>
      </span>
    </div>
  );
}
