// Reads answers aloud.

import { effect } from "@preact/signals";

import { isDictating } from "../shell/dictation";
import { listening } from "../shell/recording";
import { attempt } from "../shell/toasts";
import { pauseFor } from "../server/wake";
import { live, openChat } from "../state/chats";
import { chosenModel } from "../state/choice";
import { beginReading, readAloud, stopReading } from "../state/reading";
import { isFollowing } from "../state/runs";
import { settings } from "../state/settings";
import { versionOf } from "../state/talk";
import { canRead, serverSpeaks } from "../state/voices";
import type { Message } from "../types";
import { t } from "../words";
import { Sentences } from "./spoken";
import { allowSound, BrowserVoice, ServerVoice } from "./voices";

/** Milliseconds between two looks at an answer that is being written. */
const LOOK = 150;
/** Of the time that passes meanwhile, they take at most a quarter. */
const SHARE = 3;

/** Read an answer aloud; or stop, if it is that which is being read. Throws an Error for people. */
export async function readOrStop(message: string): Promise<void> {
  if (readAloud.peek() === message) stopReading();
  else if (!(await read(message, new Sentences()))) throw new Error(t("This answer has no text to read aloud."));
}

/** False: there was nothing to say. */
async function read(id: string, sentences: Sentences): Promise<boolean> {
  const signal = beginReading(id);
  let hasSpoken = false;
  try {
    const voice = serverSpeaks() ? new ServerVoice(chosenModel.peek()) : new BrowserVoice();
    signal.addEventListener("abort", () => voice.stop()); // at once: another voice may begin
    for (;;) {
      const begun = performance.now();
      const message = live(id)?.peek() ?? versionOf(id);
      const piece = message ? nextOf(message, sentences) : "";
      if (piece) await voice.say(piece, signal);
      else if (message?.state === "writing") await pauseFor(Math.max(LOOK, (performance.now() - begun) * SHARE), signal);
      else break;
      hasSpoken ||= piece !== "";
    }
    await voice.end(signal);
    return hasSpoken;
  } catch (error) {
    if (signal.aborted) return true;
    throw error;
  } finally {
    if (!signal.aborted) stopReading();
  }
}

function nextOf({ steps = [], content, state }: Message, sentences: Sentences): string {
  const text = [...steps.map((step) => step.content), content].join("\n\n");
  return sentences.next(text, state === "writing" && content !== ""); // text before a call is complete
}

/**
 * Stop reading when a person goes elsewhere, asks again or speaks; and read each answer while it is written, if the
 * settings say so. The function that is returned ends both.
 */
export function startReading(): () => void {
  let place = "";
  let begun: string | undefined;
  let turn = Promise.resolve();
  const end = effect(() => {
    const path = openChat.value?.path ?? [];
    const asked = path.findLast(({ role }) => role === "user");
    const here = `${asked?.chat} ${asked?.id}`;
    const isGone = readAloud.value !== "" && !path.some(({ id }) => id === readAloud.value);
    if (here !== place || isGone || listening.value !== "off" || isDictating()) stopReading();
    place = here;

    const leaf = path.at(-1);
    if (!settings.value.readAll || leaf?.state !== "writing" || !isFollowing(leaf.id)) return;
    if (begun === leaf.stream?.conversation || !navigator.userActivation.hasBeenActive) return;
    begun = leaf.stream?.conversation;
    const sentences = new Sentences();
    while (nextOf(leaf, sentences)); // skip the beginning of an answer that is continued
    turn = turn.then(whenQuiet).then(async () => {
      if (here === place && canRead()) await attempt(() => read(leaf.id, sentences));
    });
  });
  const allow = () => {
    if (settings.peek().readAll && serverSpeaks()) allowSound();
  };
  const gestures = ["keydown", "pointerup"];
  for (const gesture of gestures) document.addEventListener(gesture, allow);
  globalThis.addEventListener?.("pagehide", stopReading);
  return () => {
    for (const gesture of gestures) document.removeEventListener(gesture, allow);
    globalThis.removeEventListener?.("pagehide", stopReading);
    end();
    stopReading();
  };
}

/** Wait for the end of what is being read. */
async function whenQuiet(): Promise<void> {
  let stop: (() => void) | undefined;
  await new Promise<void>((resolve) => {
    stop = effect(() => {
      if (readAloud.value === "") resolve();
    });
  });
  stop?.();
}
