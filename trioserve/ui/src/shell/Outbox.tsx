import type { VNode } from "preact";

import { Icon } from "../icon";
import { openChat } from "../state/chats";
import { outbox, sendNext, take, type Queued } from "../state/outbox";
import { t } from "../words";
import { draft, setDraft } from "./draft";
import { attempt } from "./toasts";
import { focusComposer } from "./view";

/** The messages of the open chat that are sent once its answer is complete. */
export function Outbox(): VNode | null {
  const chat = openChat.value?.chat.id ?? "";
  const waiting = outbox.value.get(chat);
  if (!waiting) return null;
  return (
    <section class="outbox" aria-label={t("Queued messages")}>
      <ul>
        {waiting.messages.map((one) => (
          <li key={one.id}>
            <span class="outbox-text" dir="auto">
              {one.text || one.attachments.map(({ name }) => name).join(", ")}
            </span>
            <span class="hint">{waiting.isHeld ? t("not sent") : t("queued")}</span>
            <button type="button" class="icon-button" aria-label={t("Edit")} title={t("Edit")} onClick={() => editQueued(chat, one)}>
              <Icon name="edit" />
            </button>
            <button type="button" class="icon-button" aria-label={t("Remove")} title={t("Remove")} onClick={() => removeQueued(chat, one)}>
              <Icon name="close" />
            </button>
          </li>
        ))}
      </ul>
      {waiting.isHeld && (
        <button type="button" class="button" onClick={() => void attempt(() => sendNext(chat))}>
          {t("Send now")}
        </button>
      )}
    </section>
  );
}

function removeQueued(chat: string, { id }: Queued): void {
  take(chat, id);
  focusComposer();
}

/** Put a message back where it was written, before the current draft. */
export function editQueued(chat: string, { id }: Queued): void {
  const message = take(chat, id);
  focusComposer();
  if (!message) return;
  const { text, attachments } = draft.value;
  setDraft({
    text: [message.text, text].filter((one) => one.trim()).join("\n\n"),
    attachments: [...message.attachments, ...attachments],
  });
}
