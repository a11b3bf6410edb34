/** The state of an answer that is being written, in words. */

import type { Run } from "../types";
import { t } from "../words";
import { count, percent, seconds, speed } from "./format";

export interface RunText {
  text: string;
  /** The share that is done, from 0 to 1, if known. */
  share?: number;
}

/** Describe a run at a time, which is Date.now(). That the server `isLost` is said elsewhere. */
export function describeRun(run: Run, now: number, isLost = false): RunText {
  const { phase, note, progress } = run;
  switch (phase) {
    case "sending":
      return { text: waited(t("Waiting for the server"), run, now) };
    case "loading-model":
      return { text: waited(note || t("The model is loading"), run, now), share: percentIn(note) };
    case "queued":
      return { text: run.place || !note ? queued(run.place) : note };
    case "prompt": {
      if (!progress || progress.total === 0) return { text: waited(t("Prefill"), run, now) };
      const { done, total, cached } = progress;
      const share = Math.min(done / total, 1);
      const values = { share: percent(share), done: count(done), total: count(total), cached: count(cached) };
      const text = cached > 0
        ? t("Prefill {share} · {done} of {total} tokens, {cached} from the cache", values)
        : t("Prefill {share} · {done} of {total} tokens", values);
      return { text, share };
    }
    case "thinking":
      return { text: withSpeed(t("Thinking"), run) };
    case "writing":
      return { text: withSpeed(t("Generating"), run) };
    case "running-tools":
      return { text: t("Running {note}…", { note }) };
    case "asking":
      return { text: t("{note} waits for your approval", { note }) };
    case "reconnecting":
      return { text: isLost ? t("Waiting for the server…") : note || t("The connection was lost. Connecting again…") };
  }
}

function queued(place: Run["place"]): string {
  if (!place) return t("Waiting in the queue");
  const where = place.position === 1 ? t("Next in the queue") : t("Number {position} in the queue", { position: count(place.position) });
  return place.waitS === undefined || place.waitS < 0.1 ? where : t("{where}, about {waitS}", { where, waitS: seconds(place.waitS) });
}

function withSpeed(what: string, run: Run): string {
  return run.tokensPerSecond ? `${what} · ${speed(run.tokensPerSecond)}` : what;
}

/** After a while, people want to see that it is going on. */
function waited(what: string, run: Run, now: number): string {
  const passed = Math.floor((now - run.startedAt) / 1000);
  if (passed < 3) return `${what}…`;
  return `${what}, ${passed < 60 ? `${passed} s` : seconds(passed)}`;
}

/** The "40%" in a note, as a share. */
function percentIn(note: string | undefined): number | undefined {
  const found = /(\d+)\s?%/.exec(note ?? "");
  return found ? Math.min(Number(found[1]) / 100, 1) : undefined;
}

/** The text for a screen reader: only changes that matter to a listener, not each step. */
export function announce(run: Run | undefined): string {
  if (!run) return "";
  switch (run.phase) {
    case "loading-model":
      return t("The model is loading.");
    case "queued":
      return run.place ? t("In the queue, at number {position}.", { position: run.place.position }) : t("In the queue.");
    case "prompt":
      return t("Prefill.");
    case "thinking":
      return t("Thinking.");
    case "writing":
      return t("Generating.");
    case "running-tools":
      return t("The server runs a tool.");
    case "asking":
      return t("{note} waits for your approval.", { note: run.note });
    case "reconnecting":
      return t("The connection was lost. Connecting again.");
    case "sending":
      return "";
  }
}
