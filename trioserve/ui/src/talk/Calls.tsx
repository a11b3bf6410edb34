// The steps of an answer before its last: what the model said, and the calls that the server made for it.

import type { VNode } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import type { IconName } from "../icon";
import { seconds } from "../shell/format";
import { attempt } from "../shell/toasts";
import { focusAgain, focusAsked } from "../shell/view";
import { allowAll, decide, stopCall } from "../state/tools";
import type { CallState, MadeCall, Message, Step } from "../types";
import { t, type Text } from "../words";
import { Diff, DiffSize } from "./Diff";
import { Fold } from "./Fold";
import { Markdown } from "./Markdown";
import { memo } from "./memo";
import { Output, Result } from "./Output";
import { Reasoning } from "./Reasoning";
import { CallArguments } from "./Tools";
import { exposed, gist, readDiff, unshown } from "./toolText";

/** All that came before the last words of an answer. */
export function Steps({ message }: { message: Message }): VNode {
  const { chat, stream, steps = [], state } = message;
  return (
    <>
      {steps.map((step, index) => (
        <StepView key={index} step={step} chat={chat} answer={stream?.id} writing={state === "writing"} />
      ))}
    </>
  );
}

interface StepProps {
  step: Step;
  chat: string;
  /** The answer's id at the server. */
  answer: string | undefined;
  writing: boolean;
}

const StepView = memo(({ step, chat, answer, writing }: StepProps) => (
  <>
    {step.reasoning && <Reasoning text={step.reasoning} writing={false} />}
    {step.content.trim() && <Markdown text={step.content} writing={false} />}
    {step.calls.map((call) => (
      <Call key={call.id} call={call} step={step} chat={chat} answer={answer} writing={writing} />
    ))}
  </>
));

interface CallProps extends StepProps {
  call: MadeCall;
}

const ICONS: Record<CallState, IconName> = {
  called: "tool",
  asked: "hand",
  running: "tool",
  done: "check",
  failed: "alert",
  stopped: "stop",
  denied: "close",
};

const SAYS: Record<CallState, Text | ""> = {
  called: "",
  asked: "waits for your approval",
  running: "runs",
  done: "",
  failed: "failed",
  stopped: "stopped",
  denied: "not applied",
};

function Call(properties: CallProps): VNode {
  const { call, writing } = properties;
  // A call without an end when the answer ended will not end.
  const hasEnded = !["called", "asked", "running"].includes(call.state);
  const state = writing || hasEnded ? call.state : "stopped";
  const isGoingOn = state === "asked" || state === "running";
  const [whole, setWhole] = useState(false);
  const diff = call.diff ?? call.preview; // which says what the arguments do, and what a success is
  return (
    <Fold
      class="card call"
      state={state}
      icon={ICONS[state]}
      title={<Title call={call} state={state} />}
      open={isGoingOn}
    >
      <div class="card-body">
        {diff ? <Diff diff={diff} whole={whole} setWhole={setWhole} /> : <CallArguments written={call.arguments} />}
        {isGoingOn && call.output && <Output text={call.output} />}
        {!isGoingOn && call.result && !(diff && state === "done") && <Result text={call.result} failed={state === "failed"} />}
        {state === "asked" && diff && <Unshown diff={diff} written={call.arguments} whole={whole} setWhole={setWhole} />}
        {state === "asked" && <Approval {...properties} />}
        {state === "running" && <StopButton {...properties} />}
      </div>
    </Fold>
  );
}

function Title({ call, state }: { call: MadeCall; state: CallState }): VNode {
  const about = useMemo(() => gist(call.arguments), [call.arguments]);
  const size = useMemo(() => (call.diff ? readDiff(call.diff) : null), [call.diff]);
  return (
    <span class="call-title">
      <bdi class="tool">{exposed(call.title)}</bdi>
      {about && <bdi class="gist">{about}</bdi>}
      {size && state === "done" && (
        <span class="size">
          <DiffSize added={size.added} removed={size.removed} />
        </span>
      )}
      {SAYS[state] && <span class={state === "running" ? "says shimmer" : "says"}>{t(SAYS[state])}</span>}
      {state === "done" && call.seconds !== undefined && call.seconds >= 0.1 && (
        <span class="says">{seconds(call.seconds)}</span>
      )}
    </span>
  );
}

interface UnshownProps {
  diff: string;
  written: string;
  whole: boolean;
  setWhole: (whole: boolean) => void;
}

/** Says what the preview of a change does not show, and offers all of it, or all that the call has. */
function Unshown({ diff, written, whole, setWhole }: UnshownProps): VNode | null {
  const read = useMemo(() => readDiff(diff), [diff]);
  const left = unshown(read, whole);
  if (!left) return null;
  return (
    <>
      <p class="unshown" role="note">
        {t("The preview does not show {left}.", { left })}
        {!whole && (
          <button type="button" class="button" onClick={() => setWhole(true)}>
            {read.isPart ? t("Show the whole call") : t("Show all")}
          </button>
        )}
      </p>
      {whole && <CallArguments written={written} />}
    </>
  );
}

/** Asks a person whether a call may be made. */
function Approval({ call, step, chat, answer }: CallProps): VNode {
  const { isBusy, act } = useAct(() => focusAsked() || focusAgain());
  const title = exposed(call.title);
  return (
    <div class="approval" role="group" aria-label={t("Approval of {title}", { title })}>
      <p>{t("Allow this call?")}</p>
      <span class="buttons">
        <button
          type="button"
          class="button primary allow"
          disabled={isBusy}
          onClick={() => act(() => decide(answer, call.id, true))}
        >
          {t("Allow")}
        </button>
        <button
          type="button"
          class="button"
          disabled={isBusy}
          onClick={() => act(() => allowAll(chat, answer, step, call.name))}
        >
          {t("Always allow in this chat")}
        </button>
        <button
          type="button"
          class="button danger"
          disabled={isBusy}
          onClick={() => act(() => decide(answer, call.id, false))}
        >
          {t("Deny")}
        </button>
      </span>
    </div>
  );
}

function StopButton({ call, answer }: CallProps): VNode {
  const { isBusy, act } = useAct(focusAgain);
  return (
    <span class="buttons">
      <button
        type="button"
        class="button"
        aria-label={t("Stop {title}", { title: exposed(call.title) })}
        disabled={isBusy}
        onClick={() => act(() => stopCall(answer, call.id))}
      >
        {t("Stop this")}
      </button>
    </span>
  );
}

/** Does something once, until it has failed or its element is removed. Then the focus moves on. */
function useAct(leave: () => unknown): { isBusy: boolean; act: (work: () => Promise<void>) => void } {
  const [isBusy, setBusy] = useState(false);
  const hadFocus = useRef(false);
  useLayoutEffect(
    () => () => {
      if (hadFocus.current) requestAnimationFrame(leave);
    },
    [],
  );
  const act = (work: () => Promise<void>) => {
    setBusy(true);
    hadFocus.current = true;
    void attempt(async () => {
      try {
        await work();
      } catch (error) {
        setBusy(false);
        hadFocus.current = false;
        throw error;
      }
    });
  };
  return { isBusy, act };
}
