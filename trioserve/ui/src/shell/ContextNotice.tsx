import type { VNode } from "preact";

import { canCut, dropOldest, isSummarizing, summarize } from "../state/context";
import { openChat } from "../state/chats";
import { runs } from "../state/runs";
import { regenerate } from "../state/talk";
import { t } from "../words";
import { lastStats } from "./Composer";
import { percent } from "./format";
import { Notice } from "./Notice";
import { startChat } from "./shortcuts";
import { attempt } from "./toasts";

/** The share of the context above which a conversation will soon be full. */
const NEARLY_FULL = 0.9;

/** Says that a chat fills the context, and what can be done about it. */
export function ContextNotice(): VNode | null {
  const open = openChat.value;
  if (!open || runs.value.has(open.chat.id)) return null;
  if (isSummarizing.value) {
    return (
      <Notice icon="brain" quiet>
        <p>{t("The model is summarizing the oldest turns…")}</p>
        <button type="button" class="button" onClick={() => isSummarizing.value?.abort()}>
          {t("Cancel")}
        </button>
      </Notice>
    );
  }
  const stats = lastStats();
  const share = stats?.contextSize ? stats.contextUsed / stats.contextSize : 0;
  const isFull = open.path.at(-1)?.full === true || share >= 1;
  if (!isFull && share < NEARLY_FULL) return null;
  const canGo = canCut();
  return (
    <Notice icon="alert" about={`context ${open.chat.id} ${isFull}`}>
      <p>
        {isFull
          ? t(canGo ? "This chat no longer fits into the model’s context." : "This message does not fit into the model’s context.")
          : t("This chat fills {share} of the model’s context.", { share: percent(share) })}
      </p>
      <span class="buttons">
        {canGo && (
          <>
            <button type="button" class="button" onClick={() => void attempt(() => shorten(dropOldest))}>
              {t("Drop the oldest turns")}
            </button>
            <button type="button" class="button" onClick={() => void attempt(() => shorten(summarize))}>
              {t("Continue with a summary")}
            </button>
          </>
        )}
        <button type="button" class="button" onClick={startChat}>
          {t("New chat")}
        </button>
      </span>
    </Notice>
  );
}

/** Make room, and answer what did not fit. */
async function shorten(how: () => Promise<void>): Promise<void> {
  const open = openChat.peek();
  try {
    await how();
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") return; // by the person
    throw error;
  }
  const last = open?.path.at(-1);
  if (last?.full && openChat.peek()?.path.at(-1)?.id === last.id) await regenerate(last.id);
}
