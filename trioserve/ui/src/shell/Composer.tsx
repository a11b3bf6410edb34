import { useComputed } from "@preact/signals";
import type { VNode } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

import { Icon } from "../icon";
import { openChat } from "../state/chats";
import { kindOf } from "../state/media";
import { enqueue, outbox, sendNext } from "../state/outbox";
import { runs } from "../state/runs";
import { whenKnown } from "../state/server";
import { settings } from "../state/settings";
import { send, stop } from "../state/talk";
import type { Attachment, Stats } from "../types";
import { t } from "../words";
import { AttachTools } from "./AttachTools";
import { attach, attachText, detach, draft, isAttaching, setDraft } from "./draft";
import { bytes, count, percent } from "./format";
import { useObjectUrl } from "./objectUrl";
import { editQueued } from "./Outbox";
import { listening } from "./recording";
import { attempt, say } from "./toasts";
import { focusComposer, touch } from "./view";

/** Characters from which on a pasted text is attached. */
const LONG_PASTE = 8000;

/** Takes back the offer to paste it as text after all, once it is sent. */
let takeBackOffer = (): void => undefined;

/** The field for a message, with its attachments. */
export function Composer(): VNode {
  const { text, attachments } = draft.value;
  const chat = openChat.value?.chat.id;
  const running = useComputed(() => runs.value.has(openChat.value?.chat.id ?? ""));
  // Files being read and the recording are parts of the message.
  const isComplete = !isAttaching.value && listening.value === "off";
  const canSend = isComplete && (text.trim() !== "" || attachments.length > 0);
  const label = running.value ? t("Queue") : t("Send");
  const waiting = outbox.value.get(chat ?? "");
  const submit = () => {
    if (!canSend || !chat) return;
    stay();
    if (running.value || waiting) queueDraft(chat);
    else void attempt(() => sendDraft(chat));
    if (!running.value && waiting) void attempt(() => sendNext(chat));
  };
  return (
    <form
      class="composer"
      aria-label={t("Message")}
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      {attachments.length > 0 && (
        <ul class="chips" aria-label={t("Attached files")}>
          {attachments.map((one) => (
            <Chip key={one.id} attachment={one} />
          ))}
        </ul>
      )}
      <TextField onSubmit={submit} />
      <div class="composer-foot">
        <AttachTools />
        <span class="space" />
        <ContextRing />
        {running.value && chat && (
          <button
            type="button"
            class="icon-button send stop"
            aria-label={t("Stop")}
            title={t("Stop (Esc)")}
            onClick={() => {
              stay();
              void attempt(() => stop(chat));
            }}
          >
            <Icon name="stop" />
          </button>
        )}
        {(!running.value || canSend) && (
          <button type="submit" class="icon-button send" aria-label={label} title={label} disabled={!canSend || !chat}>
            <Icon name="send" />
          </button>
        )}
      </div>
    </form>
  );
}

/** The button that was pressed goes, and the focus with it. On a phone, the keyboard would come up. */
function stay(): void {
  if (!touch.value) focusComposer();
}

/** Have the draft sent after the answer that is being written. */
function queueDraft(chat: string): void {
  const { text, attachments } = draft.value;
  setDraft({ text: "", attachments: [] });
  takeBackOffer();
  enqueue(chat, text.trim(), attachments);
}

/** Send the draft; it is back if that fails. */
async function sendDraft(chat: string): Promise<void> {
  const { text, attachments } = draft.value;
  setDraft({ text: "", attachments: [] });
  takeBackOffer();
  try {
    await whenKnown(); // else the chat would get no model, and a long document no limit
    await send(text.trim(), attachments, chat);
  } catch (error) {
    if (draft.value.text === "" && draft.value.attachments.length === 0) setDraft({ text, attachments });
    throw error;
  }
}

function TextField({ onSubmit }: { onSubmit: () => void }): VNode {
  const area = useRef<HTMLTextAreaElement>(null);
  const { text } = draft.value;
  useLayoutEffect(() => {
    // For browsers without field-sizing.
    if (!area.current || CSS.supports("field-sizing", "content")) return;
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight}px`;
  }, [text]);

  const onKey = (event: KeyboardEvent) => {
    if (event.isComposing || event.shiftKey || event.altKey) return;
    const mod = event.ctrlKey || event.metaKey;
    if (event.key === "ArrowUp" && !mod && text === "" && editLast()) event.preventDefault();
    if (event.key !== "Enter") return;
    const plainSends = settings.value.sendKey === "enter" && !touch.value;
    if (!mod && !plainSends) return;
    event.preventDefault();
    onSubmit();
  };
  return (
    <textarea
      ref={area}
      id="message"
      rows={1}
      dir="auto"
      aria-label={t("Message")}
      placeholder={t("Write a message")}
      value={text}
      onInput={(event) => setDraft({ text: event.currentTarget.value })}
      onKeyDown={onKey}
      onPaste={onPaste}
    />
  );
}

/** Files become attachments, and so does a text that would bury what is written around it. */
function onPaste(event: ClipboardEvent): void {
  const pasted = event.clipboardData?.getData("text/plain") ?? "";
  const files = [...(event.clipboardData?.files ?? [])];
  // A table copied from an office program comes as text, and as a picture of it.
  if (pasted.length < LONG_PASTE && (pasted || files.length === 0)) return;
  event.preventDefault();
  if (!pasted) {
    void attach(files);
    return;
  }
  const id = attachText(pasted);
  const write = () => {
    detach(id);
    setDraft({ text: draft.value.text + pasted });
  };
  takeBackOffer();
  takeBackOffer = say(t("The text is attached as a file."), { label: t("Paste as text"), run: write });
}

/** Begin to edit the last message of the user, be it queued or sent; false: the user has sent no message. */
function editLast(): boolean {
  const chat = openChat.value?.chat.id ?? "";
  const queued = outbox.value.get(chat)?.messages.at(-1);
  if (queued) {
    editQueued(chat, queued);
    return true;
  }
  const last = [...document.querySelectorAll(".message.user")].at(-1);
  const button = last?.querySelector<HTMLElement>(".edit-button");
  button?.click();
  return button !== undefined && button !== null;
}

function Chip({ attachment }: { attachment: Attachment }): VNode {
  const { id, name, size, type, data } = attachment;
  const url = useObjectUrl(data);
  const isPicture = kindOf(type) === "image" && data;
  return (
    <li class="chip">
      {isPicture ? <img class="thumbnail" src={url} alt="" /> : <Icon name={kindOf(type) && data ? "media" : "file"} />}
      <span class="chip-name" dir="auto" title={name}>
        {name}
      </span>
      <span class="hint">{bytes(size)}</span>
      <button
        type="button"
        class="icon-button"
        aria-label={t("Remove {name}", { name })}
        title={t("Remove")}
        onClick={() => {
          detach(id);
          document.getElementById("message")?.focus();
        }}
      >
        <Icon name="close" />
      </button>
    </li>
  );
}

/** The share of the model's context that the conversation takes, as a ring. */
function ContextRing(): VNode | null {
  const stats = lastStats();
  if (!stats?.contextSize) return null;
  const share = Math.min(stats.contextUsed / stats.contextSize, 1);
  const says = t("{share} of the context is used: {contextUsed} of {contextSize} tokens", { share: percent(share), contextUsed: count(stats.contextUsed), contextSize: count(stats.contextSize) });
  return (
    <span class={share > 0.85 ? "ring nearly-full" : "ring"} role="img" aria-label={says} title={says}>
      <svg viewBox="0 0 20 20" aria-hidden="true">
        <circle class="ring-all" cx="10" cy="10" r="7.5" pathLength={100} />
        <circle class="ring-used" cx="10" cy="10" r="7.5" pathLength={100} stroke-dasharray={`${share * 100} 100`} />
      </svg>
    </span>
  );
}

/** The figures of the last answer that has some. */
export function lastStats(): Stats | undefined {
  const open = openChat.value;
  const last = open?.path.findLast((message) => message.stats);
  return last && last.createdAt > (open?.chat.start?.since ?? 0) ? last.stats : undefined;
}
