import { useComputed } from "@preact/signals";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Icon, type IconName } from "../icon";
import { openChat, setChat } from "../state/chats";
import { props, takes } from "../state/server";
import { settings, withValue } from "../state/settings";
import { t } from "../words";
import { mediaTaken } from "./attachments";
import { canDictate, dictate, endDictation, isDictating } from "./dictation";
import { attach, draft, setDraft } from "./draft";
import { choose } from "./files";
import { McpMenu } from "./McpMenu";
import { ToolMenu } from "./ToolMenu";
import { listening, record, stopRecording } from "./recording";

import { attempt } from "./toasts";
import { overlay } from "./view";

/** The buttons for what goes along with a message. Pictures and sound only where the model takes them. */
export function AttachTools(): VNode {
  const taken = useComputed(() => mediaTaken().join(", ")).value;
  const label = taken ? t("Attach files") : t("Attach text files");
  return (
    <>
      <button
        type="button"
        class="icon-button"
        aria-label={label}
        title={taken ? t("Attach texts, {taken}", { taken }) : label}
        onClick={() => void attach(choose({ multiple: true }))}
      >
        <Icon name="paperclip" />
      </button>
      {takes("image") && (
        <button type="button" class="icon-button" aria-label={t("Draw")} title={t("Draw")} onClick={() => (overlay.value = "draw")}>
          <Icon name="draw" />
        </button>
      )}
      {takes("audio") && <RecordButton />}
      {canDictate && settings.value.dictation && <DictateButton />}
      <ThinkingButton />
      <ToolMenu />
      <McpMenu />
    </>
  );
}

/** Writes what is said at the end of the message. */
function DictateButton(): VNode {
  const isOn = isDictating();
  const label = isOn ? t("Stop dictating") : t("Dictate, by the browser");
  const add = (heard: string) => setDraft({ text: [draft.value.text.trimEnd(), heard].filter(Boolean).join(" ") });
  const press = () => (isOn ? endDictation() : void attempt(() => dictate(add)));
  return <Listen isOn={isOn} icon="dictate" label={label} press={press} />;
}

/** The switch for reasoning in the open chat, if the model has one. */
function ThinkingButton(): VNode | null {
  const caps = props.value?.chat_template_caps ?? {};
  const chat = openChat.value?.chat;
  if (!chat || !(caps.supports_enable_thinking || caps.supports_reasoning_effort)) return null;
  const all = settings.value.sampling.reasoning_effort;
  const isOn = (chat.sampling.reasoning_effort ?? all) !== "none";
  const to = isOn ? "none" : all === "none" ? "medium" : undefined;
  return (
    <button
      type="button"
      class={isOn ? "icon-button tools-button on" : "icon-button tools-button"}
      aria-pressed={isOn}
      aria-label={t("Think before answering")}
      title={t("Think before answering")}
      onClick={() => void attempt(() => setChat(chat.id, { sampling: withValue(chat.sampling, "reasoning_effort", to) }))}
    >
      <Icon name="brain" />
    </button>
  );
}

function RecordButton(): VNode {
  const isOn = listening.value === "on";
  const label = isOn ? t("Stop recording") : t("Record");
  const press = () => void (isOn ? stopRecording() : attach(record().then((file) => [file])));
  return (
    <Listen isOn={isOn} icon="microphone" label={label} press={press} disabled={listening.value === "asking"}>
      {isOn && <Clock />}
    </Listen>
  );
}

interface ListenProps {
  isOn: boolean;
  icon: IconName;
  label: string;
  press: () => void;
  disabled?: boolean;
  children?: ComponentChildren;
}

/** A button that has the page listen, and stops that. */
function Listen({ isOn, icon, label, press, disabled = false, children }: ListenProps): VNode {
  return (
    <button
      type="button"
      class={isOn ? "icon-button recording" : "icon-button"}
      aria-label={label}
      title={label}
      disabled={disabled}
      onClick={press}
    >
      <Icon name={isOn ? "stop" : icon} />
      {children}
    </button>
  );
}

/** Minutes and seconds since it is there. */
function Clock(): VNode {
  const [began] = useState(Date.now);
  const [now, setNow] = useState(began);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 500);
    return () => clearInterval(timer);
  }, []);
  const seconds = Math.floor((now - began) / 1000);
  return (
    <span aria-hidden="true">
      {Math.floor(seconds / 60)}:{String(seconds % 60).padStart(2, "0")}
    </span>
  );
}
