// Changes a message where it stands. The one that was stays, as another version.

import type { VNode } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

import { attempt } from "../shell/toasts";
import { focusComposer, touch } from "../shell/view";
import { settings } from "../state/settings";
import { edit } from "../state/talk";
import type { Message } from "../types";
import { t } from "../words";
import { Attachments } from "./Attachments";

/** A field with the text of a message, and the buttons that keep or drop the change. */
export function EditForm({ message, close }: { message: Message; close: () => void }): VNode {
  const [text, setText] = useState(message.content);
  const [attachments, setAttachments] = useState(message.attachments);
  const field = useRef<HTMLTextAreaElement>(null);
  const answer = message.role === "assistant";
  const empty = text.trim() === "" && attachments.length === 0;

  useLayoutEffect(() => {
    const { current } = field;
    current?.focus();
    current?.setSelectionRange(current.value.length, current.value.length);
  }, []);
  useLayoutEffect(() => {
    const { current } = field;
    if (!current) return;
    current.style.height = "auto";
    current.style.height = `${current.scrollHeight + 2}px`;
  }, [text]);

  const save = () => {
    if (empty) return;
    void attempt(async () => {
      await edit(message.id, answer ? text : text.trim(), attachments);
      close();
      if (!answer && !touch.value) focusComposer();
    });
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.isComposing && sends(event, answer)) {
      event.preventDefault();
      save();
    }
  };
  return (
    <div class="edit">
      <Attachments list={attachments} remove={(id) => setAttachments(attachments.filter((one) => one.id !== id))} />
      <textarea
        ref={field}
        rows={1}
        aria-label={answer ? t("Edit the answer") : t("Edit your message")}
        dir="auto"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={onKeyDown}
      />
      <div class="buttons">
        <button type="button" class="button" onClick={close}>
          {t("Cancel")}
        </button>
        <button type="button" class="button primary" disabled={empty} onClick={save}>
          {answer ? t("Save") : t("Send")}
        </button>
      </div>
    </div>
  );
}

/** A line of an answer is often ended where it is edited, so that there a key has to be held. */
function sends(event: KeyboardEvent, answer: boolean): boolean {
  if (event.ctrlKey || event.metaKey) return true;
  return !answer && settings.value.sendKey === "enter" && !touch.value && !event.shiftKey;
}
