/** Recordings from the microphone. */

import { signal, type ReadonlySignal } from "@preact/signals";
import { t } from "../words";

/** Minutes after which a recording ends by itself. */
export const MAX_MINUTES = 10;

/** Bits a second: enough for speech. */
const QUALITY = 48_000;

const state = signal<"off" | "asking" | "on">("off");
let end = (): void => undefined;

/** "on" while the page listens, "asking" while the browser asks the person for permission. */
export const listening: ReadonlySignal<"off" | "asking" | "on"> = state;

/**
 * Record sound until `stopRecording`. Returns the recording; throws an Error for people if recording
 * failed.
 */
export async function record(now = new Date()): Promise<File> {
  if (state.peek() !== "off") throw new Error(t("A recording is being made already."));
  state.value = "asking";
  try {
    const stream = await microphone();
    try {
      return await recorded(stream, now);
    } finally {
      for (const track of stream.getTracks()) track.stop(); // the browser no longer shows that it listens
    }
  } finally {
    state.value = "off";
  }
}

/** End the recording that is being made. */
export function stopRecording(): void {
  end();
}

async function microphone(): Promise<MediaStream> {
  if (!navigator.mediaDevices || !globalThis.MediaRecorder) throw new Error(t(NOT_HERE));
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    const { name } = error as DOMException;
    if (name === "NotAllowedError") throw new Error(t("The browser does not let the page use the microphone."));
    if (name === "NotFoundError") throw new Error(t("There is no microphone."));
    throw new Error(t("The microphone does not work. Perhaps another program uses it."));
  }
}

const NOT_HERE = "Browsers let a page use the microphone only with https, or where the server runs on the same machine.";

function recorded(stream: MediaStream, now: Date): Promise<File> {
  return new Promise((resolve, reject) => {
    const recorder = new MediaRecorder(stream, { audioBitsPerSecond: QUALITY });
    const parts: Blob[] = [];
    const timer = setTimeout(() => recorder.stop(), MAX_MINUTES * 60_000);
    recorder.ondataavailable = ({ data }) => parts.push(data);
    recorder.onstop = () => {
      clearTimeout(timer);
      end = () => undefined;
      const type = recorder.mimeType.replace(/;.*/, "") || "audio/webm";
      const file = new File(parts, nameFor(type, now), { type });
      if (file.size > 0) resolve(file);
      else reject(new Error(t("The microphone has given nothing.")));
    };
    end = () => recorder.stop();
    recorder.start();
    state.value = "on";
  });
}

/** A name with the time of day. */
export function nameFor(type: string, now: Date): string {
  const time = [now.getHours(), now.getMinutes(), now.getSeconds()].map((part) => String(part).padStart(2, "0"));
  const ending = type.slice(type.indexOf("/") + 1);
  return t("Recording {it}.{it2}", { it: time.join("."), it2: ending === "mp4" ? "m4a" : ending });
}
