/** Dictation by the browser. */

import { signal } from "@preact/signals";

import { language, t } from "../words";

interface Heard {
  results: ArrayLike<ArrayLike<{ transcript: string }> & { isFinal: boolean }>;
  resultIndex: number;
}

/** As far as it is used; TypeScript does not know it. */
interface Recognition {
  lang: string;
  continuous: boolean;
  onresult: (event: Heard) => void;
  onend: () => void;
  onerror: (event: { error: string }) => void;
  start(): void;
  stop(): void;
}

declare const webkitSpeechRecognition: (new () => Recognition) | undefined;

/** True if the browser takes dictation. */
export const canDictate = typeof webkitSpeechRecognition !== "undefined";

const current = signal<Recognition | null>(null);

/** True while the browser listens. */
export const isDictating = (): boolean => current.value !== null;

/** Give what is said to `onText`, a piece at a time, until `endDictation`. An Error for people says why not. */
export function dictate(onText: (text: string) => void): Promise<void> {
  return new Promise((resolve, reject) => {
    const recognition = new webkitSpeechRecognition!();
    recognition.lang = language.peek();
    recognition.continuous = true;
    recognition.onresult = ({ results, resultIndex }) => {
      const heard = Array.from(results).slice(resultIndex).filter(({ isFinal }) => isFinal);
      for (const one of heard) onText(one[0]!.transcript.trim());
    };
    recognition.onerror = ({ error }) => {
      if (error !== "no-speech" && error !== "aborted") reject(new Error(t("The browser does not take dictation: {error}.", { error })));
    };
    recognition.onend = () => {
      current.value = null;
      resolve();
    };
    current.value = recognition;
    recognition.start();
  });
}

/** Listen no longer. */
export function endDictation(): void {
  current.peek()?.stop();
}
