import { useComputed, useSignal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { openChat } from "../state/chats";
import { runs } from "../state/runs";
import { server } from "../state/server";
import type { MessageState } from "../types";
import { t, type Text } from "../words";
import { announce, describeRun } from "./runText";
import { focusAsked } from "./view";

/** The progress of the open chat's answer: its place in the queue, the prompt, the speed. */
export function RunStatus(): VNode {
  const run = useComputed(() => runs.value.get(openChat.value?.chat.id ?? ""));
  const now = useSignal(Date.now());
  const isRunning = run.value !== undefined;
  useEffect(() => {
    if (!isRunning) return undefined;
    const timer = setInterval(() => (now.value = Date.now()), 1000);
    return () => clearInterval(timer);
  }, [isRunning]);
  const isLost = server.value.state === "unreachable"; // there is a notice
  const told = run.value && describeRun(run.value, now.value, isLost);
  return (
    <>
      {told && (
        <div class="run" data-phase={run.value?.phase}>
          <span class="pulse" />
          <span class="run-text">{told.text}</span>
          {run.value?.phase === "asking" && (
            <button type="button" class="button" onClick={focusAsked}>
              {t("Show")}
            </button>
          )}
          {told.share !== undefined && <progress max={1} value={told.share} aria-label={t("Progress")} />}
        </div>
      )}
      <Announcer />
    </>
  );
}

const endings: Record<MessageState, Text | ""> = {
  done: "The answer is complete.",
  stopped: "The answer was stopped.",
  failed: "The answer failed.",
  writing: "",
};

/** Tells a screen reader what happens with the answer, and when it has ended. */
function Announcer(): VNode {
  const open = openChat.value;
  const run = useComputed(() => runs.value.get(openChat.value?.chat.id ?? ""));
  const told = useComputed(() => (server.value.state === "unreachable" ? "" : announce(run.value)));
  const last = useRef<string | undefined>(undefined);
  const message = useComputed(() => run.value?.message).value;
  if (message) last.current = message;
  const ended = message ? undefined : open?.path.find((one) => one.id === last.current);
  return (
    <p class="visually-hidden" role="status">
      {ended ? endings[ended.state] && t(endings[ended.state] as Text) : told.value}
    </p>
  );
}
