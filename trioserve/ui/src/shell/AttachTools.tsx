import { useComputed } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Icon } from "../icon";
import { takes } from "../state/server";
import { t } from "../words";
import { mediaTaken } from "./attachments";
import { attach } from "./draft";
import { choose } from "./files";
import { McpMenu } from "./McpMenu";
import { ToolMenu } from "./ToolMenu";
import { listening, record, stopRecording } from "./recording";
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
      <ToolMenu />
      <McpMenu />
    </>
  );
}

function RecordButton(): VNode {
  const isOn = listening.value === "on";
  const label = isOn ? t("Stop recording") : t("Record");
  const press = () => void (isOn ? stopRecording() : attach(record().then((file) => [file])));
  return (
    <button
      type="button"
      class={isOn ? "icon-button recording" : "icon-button"}
      aria-label={label}
      title={label}
      disabled={listening.value === "asking"}
      onClick={press}
    >
      <Icon name={isOn ? "stop" : "microphone"} />
      {isOn && <Clock />}
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
