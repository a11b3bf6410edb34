// The voices that read aloud: the server's, and those of the browser.

import { posting, request, ServerError } from "../server/api";
import { pauseFor } from "../server/wake";
import { settings } from "../state/settings";
import { voicesOf } from "../state/voices";
import { t } from "../words";

export interface Voice {
  /** Speak a text after those before. Returns when the next one is wanted; throws an Error for people. */
  say(text: string, signal: AbortSignal): Promise<void>;
  /** Wait until all is spoken. */
  end(signal: AbortSignal): Promise<void>;
  /** Be silent. */
  stop(): void;
}

/** Samples a second of what the server sends. */
const RATE = 24_000;

/** Seconds of sound from which on no more is asked for: a listener may stop, and others want to speak. */
const AHEAD = 15;

/** Seconds between the arrival of sound and its start; twice as many after each gap within a text, up to a limit. */
const LEAD = 0.08;
const MAX_LEAD = 2;

/** Seconds that sound may be on its way to the ear, as without a cable. */
const TAIL = 0.3;

/** Milliseconds in which a browser begins to play. Without a device for sound, or permission to use it, it never does. */
const PATIENCE = 5_000;

/** The waits for a full server, in milliseconds. */
const TRIES = 5;
const WAIT = 2_000;
const MAX_WAIT = 30_000;

let context: AudioContext | null = null;

/** Some browsers allow sound only if it first begins while a key or a button is pressed. */
export function allowSound(): void {
  if (!context) openSound();
}

function openSound(): AudioContext {
  context ??= new AudioContext({ sampleRate: RATE });
  void context.resume();
  return context;
}

/** The voice of a server. Its sound is played while it arrives. */
export class ServerVoice implements Voice {
  readonly #sound = openSound();
  readonly #playing = new Set<AudioBufferSourceNode>();
  #voice: string | undefined;
  #endsAt = 0;
  #lead = LEAD;
  /** The next sound is the first of a text. */
  #isFirst = true;

  constructor(private readonly model: string) {}

  async say(text: string, signal: AbortSignal): Promise<void> {
    this.#isFirst = true;
    this.#voice ??= await voiceFor(this.model, signal);
    const body = { model: this.model || undefined, input: text, voice: this.#voice, speed: settings.peek().readSpeed, response_format: "pcm" };
    const response = await patiently(() => request("v1/audio/speech", posting(body, { signal })), signal);
    // What a proxy writes in its place would be noise.
    if (!response.headers.get("Content-Type")?.startsWith("audio/")) throw new Error(t("The server has sent no sound."));
    const reader = response.body!.getReader();
    let odd = new Uint8Array(0); // half of a sample
    for (;;) {
      const { value, done } = await reader.read().catch((error: unknown) => {
        throw signal.aborted ? error : new Error(t("The sound from the server broke off."));
      });
      if (done) break;
      const bytes = new Uint8Array(odd.length + value.length);
      bytes.set(odd);
      bytes.set(value, odd.length);
      odd = bytes.slice(bytes.length & ~1);
      if (bytes.length > 1) this.#play(new Int16Array(bytes.buffer, 0, bytes.length >> 1));
    }
    await this.#until(AHEAD, signal);
  }

  async end(signal: AbortSignal): Promise<void> {
    await this.#until(-TAIL, signal);
  }

  stop(): void {
    for (const source of this.#playing) source.stop();
    void this.#sound.suspend();
  }

  #play(samples: Int16Array): void {
    const now = this.#sound.currentTime;
    if (this.#endsAt <= now) {
      if (!this.#isFirst) this.#lead = Math.min(MAX_LEAD, 2 * this.#lead);
      this.#endsAt = now + this.#lead;
    }
    this.#isFirst = false;
    const buffer = this.#sound.createBuffer(1, samples.length, RATE);
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    const source = this.#sound.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#sound.destination);
    source.onended = () => this.#playing.delete(source);
    this.#playing.add(source);
    source.start(this.#endsAt);
    this.#endsAt += buffer.duration;
  }

  /** Wait until this many seconds of sound are left. */
  async #until(seconds: number, signal: AbortSignal): Promise<void> {
    let waited = 0;
    for (;;) {
      const ahead = this.#endsAt - this.#sound.currentTime - seconds;
      if (ahead <= 0) return;
      if (this.#sound.state === "running") waited = 0;
      if (waited >= PATIENCE) throw new Error(t("The browser plays no sound."));
      const pause = Math.min(PATIENCE, Math.max(50, 1000 * ahead));
      await pauseFor(pause, signal);
      waited += pause;
    }
  }
}

/** Send a request again while the server is full. */
async function patiently<T>(ask: () => Promise<T>, signal: AbortSignal): Promise<T> {
  for (let tries = 1; ; tries += 1) {
    try {
      return await ask();
    } catch (error) {
      if (!(error instanceof ServerError) || !["full", "loading"].includes(error.reason) || tries === TRIES) throw error;
      const { retryAfter: wait = WAIT } = error;
      if (wait > MAX_WAIT) throw error; // a budget is used up
      await pauseFor(wait, signal);
    }
  }
}

/** The chosen voice, unless the model does not have it. */
async function voiceFor(model: string, signal: AbortSignal): Promise<string> {
  const { voice } = settings.peek();
  const hasIt = voice && (await voicesOf(model, signal)).some(({ id }) => id === voice);
  return hasIt ? voice : "default";
}

/** A voice of the browser; of those that send the text to no one, if there are any. */
export class BrowserVoice implements Voice {
  #last = Promise.resolve();
  /** A browser may forget those that nothing holds, and never tell their end. */
  readonly #waiting = new Set<SpeechSynthesisUtterance>();

  async say(text: string, signal: AbortSignal): Promise<void> {
    const before = this.#last;
    this.#last = this.#spoken(text, signal);
    this.#last.catch(() => undefined);
    await before;
  }

  async end(): Promise<void> {
    await this.#last;
  }

  stop(): void {
    speechSynthesis.cancel();
  }

  #spoken(text: string, signal: AbortSignal): Promise<void> {
    const utterance = new SpeechSynthesisUtterance(text);
    const own = speechSynthesis.getVoices().filter(({ localService }) => localService);
    const voice = own.find((one) => one.default) ?? own[0];
    if (voice) utterance.voice = voice;
    utterance.rate = settings.peek().readSpeed;
    this.#waiting.add(utterance);
    return new Promise<void>((resolve, reject) => {
      signal.addEventListener("abort", () => reject(signal.reason));
      utterance.onend = () => resolve();
      utterance.onerror = ({ error }) => reject(new Error(t("The browser cannot read aloud: {error}.", { error })));
      speechSynthesis.speak(utterance);
    }).finally(() => this.#waiting.delete(utterance));
  }
}
