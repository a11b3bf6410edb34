// Reading aloud, with a server and a sound card that a test controls.

import assert from "node:assert/strict";
import { after, afterEach, beforeEach, mock, test } from "node:test";

import "../testing/window";
import { settle } from "../testing/browser";
import { FakeServer } from "../testing/fake_server";
import { chatFor, messageFor } from "../testing/messages";
import type { Message } from "../types";

class Source {
  buffer!: { duration: number; samples: number[] };
  onended = (): void => undefined;
  isStopped = false;
  constructor(readonly card: Card) {}
  connect(): void {}
  start(at: number): void {
    this.card.played.push({ at, samples: this.buffer.samples, source: this });
  }
  stop(): void {
    this.isStopped = true;
  }
}

class Card {
  currentTime = 0;
  state = "suspended";
  played: { at: number; samples: number[]; source: Source }[] = [];
  destination = {};
  constructor() {
    card = this;
  }
  async resume(): Promise<void> {
    this.state = "running";
  }
  async suspend(): Promise<void> {
    this.state = "suspended";
  }
  createBuffer(_: number, length: number, rate: number): Source["buffer"] & { copyToChannel: (from: Float32Array) => void } {
    const samples: number[] = [];
    return { duration: length / rate, samples, copyToChannel: (from) => from.forEach((one) => samples.push(one)) };
  }
  createBufferSource(): Source {
    return new Source(this);
  }
}

let card: Card;

/** A request for sound, and the sound that a test gives. */
interface Speech {
  body: Record<string, unknown>;
  signal: AbortSignal;
  sound: ReadableStreamDefaultController<Uint8Array>;
}

const speeches: Speech[] = [];
let refusals: Response[] = [];
const fake = new FakeServer();
fake.install();
const others = globalThis.fetch;
Object.assign(globalThis, {
  AudioContext: Card,
  async fetch(url: string, options: RequestInit): Promise<Response> {
    if (!url.endsWith("v1/audio/speech")) return others(url, options);
    const { signal } = options;
    signal!.throwIfAborted();
    const refusal = refusals.shift();
    if (refusal) return refusal;
    const stream = new ReadableStream<Uint8Array>({
      start(sound) {
        signal!.addEventListener("abort", () => sound.error(signal!.reason));
        speeches.push({ body: JSON.parse(options.body as string), signal: signal!, sound });
      },
    });
    return new Response(stream, { headers: { "Content-Type": "audio/pcm" } });
  },
});
Object.defineProperty(globalThis, "navigator", { value: { language: "en", userActivation: { hasBeenActive: true } }, configurable: true });
mock.timers.enable({ apis: ["setTimeout"] });
after(() => mock.timers.reset());

const { openChat, showNew, change, showLive, endLive } = await import("../state/shown");
const { readAloud, stopReading } = await import("../state/reading");
const { defaults, settings } = await import("../state/settings");
const { look, props } = await import("../state/server");
const { readOrStop } = await import("./reading");

beforeEach(async () => {
  speeches.length = 0;
  settings.value = defaults;
  fake.routes.set("GET /health", () => ({ body: {} }));
  fake.routes.set("GET /props", () => ({ body: { endpoint_speech: true, default_generation_settings: { params: {}, n_ctx: 1 } } }));
  fake.routes.set("GET /v1/models", () => ({ body: { data: [{ id: "m" }] } }));
  await look();
  assert.equal(props.peek()?.endpoint_speech, true);
});

afterEach(() => void stopReading());

async function shows(content: string, fields: Partial<Message> = {}): Promise<Message> {
  const answer = messageFor({ id: "a", parent: "q", role: "assistant", content, ...fields });
  showNew(chatFor({}));
  await change("c", { leaf: "a" }, [messageFor({ id: "q", content: "So?" }), answer]);
  assert.equal(openChat.peek()?.path.length, 2);
  return answer;
}

/** Seconds of sound. */
const sound = (seconds: number) => new Uint8Array(48_000 * seconds);

/** Let time pass for the sound card, and for those who wait. */
async function pass(seconds: number): Promise<void> {
  card.currentTime += seconds;
  mock.timers.tick(1000 * seconds + 50);
  await settle();
}

test("an answer is spoken in pieces, and the next is asked for when there is little left of the last", async () => {
  const sentence = `${"word ".repeat(90)}end.`;
  await shows([sentence, sentence, "Last one."].join("\n\n"));
  settings.value = { ...defaults, readSpeed: 1.5 };
  const reading = readOrStop("a");
  await settle();
  assert.equal(readAloud.peek(), "a");
  assert.deepEqual(speeches.map(({ body }) => body), [
    { model: "m", input: sentence, voice: "default", speed: 1.5, response_format: "pcm" },
  ]);
  // A sample may be in two pieces.
  speeches[0]!.sound.enqueue(Uint8Array.of(0, 0x40, 0));
  await settle();
  speeches[0]!.sound.enqueue(Uint8Array.of(0xc0));
  speeches[0]!.sound.enqueue(sound(20));
  speeches[0]!.sound.close();
  await settle();
  const [first, second, third] = card.played;
  assert.deepEqual([first!.samples, second!.samples, third!.samples.length], [[0.5], [-0.5], 480_000]);
  assert.ok(first!.at > 0);
  for (const [at, one] of [second!, third!].entries()) assert.ok(Math.abs(one.at - first!.at - (at + 1) / 24_000) < 1e-9);
  assert.equal(speeches.length, 1);
  await pass(6);
  assert.deepEqual(speeches.slice(1).map(({ body }) => body.input), [`${sentence} Last one.`]);
  speeches[1]!.sound.enqueue(sound(1));
  speeches[1]!.sound.close();
  await settle();
  assert.equal(readAloud.peek(), "a");
  await pass(16);
  await reading;
  assert.deepEqual([readAloud.peek(), card.state], ["", "suspended"]);
});

test("a server that is slower than speech makes one long pause, not many", async () => {
  await shows("Slowly.");
  void readOrStop("a");
  await settle();
  const gaps: number[] = [];
  card.currentTime = 0;
  card.played = [];
  let end = 0;
  for (let at = 0; at < 12; at++) {
    speeches[0]!.sound.enqueue(sound(0.5));
    await settle();
    const next = card.played.at(-1)!.at;
    if (next > end + 1e-9) gaps.push(at);
    end = next + 0.5;
    card.currentTime += 0.6;
  }
  assert.ok(gaps.length <= 4, String(gaps));
});

test("a pause between two texts is not taken for a slow server", async () => {
  const answer = await shows("One. T", { state: "writing" });
  const reading = readOrStop("a");
  await settle();
  for (const [at, content] of ["One. Two. T", "One. Two. Three. F", "One. Two. Three. Four"].entries()) {
    speeches[at]!.sound.enqueue(sound(0.5));
    speeches[at]!.sound.close();
    await settle();
    assert.ok(Math.abs(card.played.at(-1)!.at - card.currentTime - 0.08) < 1e-9);
    await pass(5);
    showLive({ ...answer, content });
    await pass(1);
  }
  endLive({ ...answer, state: "done" });
  stopReading();
  await reading;
});

test("stopping ends the request and the sound at once", async () => {
  await shows("One. Two.");
  const reading = readOrStop("a");
  await settle();
  speeches[0]!.sound.enqueue(sound(3));
  await settle();
  await readOrStop("a");
  await reading;
  assert.ok(speeches[0]!.signal.aborted);
  assert.ok(card.played.at(-1)!.source.isStopped);
  assert.deepEqual([readAloud.peek(), card.state], ["", "suspended"]);
});

test("another answer takes the place of the one that is read", async () => {
  await shows("One.");
  const reading = readOrStop("a");
  await settle();
  const other = readOrStop("q"); // any message has words
  await settle();
  await reading;
  assert.equal(readAloud.peek(), "q");
  assert.deepEqual(speeches.map(({ signal }) => signal.aborted), [true, false]);
  assert.equal(card.state, "running");
  stopReading();
  await other;
});

test("an error of the server and a sound that breaks off end the reading with an error", async () => {
  await shows("One.");
  refusals = [Response.json({ error: { message: "No such voice.", code: 400 } }, { status: 400 })];
  await assert.rejects(readOrStop("a"), /No such voice/);
  assert.equal(readAloud.peek(), "");
  refusals = [new Response("<p>Log in")];
  await assert.rejects(readOrStop("a"), /no sound/);
  const reading = readOrStop("a");
  await settle();
  speeches[0]!.sound.enqueue(sound(1));
  await settle();
  speeches[0]!.sound.error(new TypeError("network error"));
  await assert.rejects(reading, /broke off/);
  assert.equal(readAloud.peek(), "");
});

test("a full server is asked again, but not for ever", async () => {
  await shows("One.");
  const full = (wait = 3) =>
    Response.json({ error: { message: "Full.", code: 429 } }, { status: 429, headers: { "Retry-After": `${wait}` } });
  refusals = [full(), full()];
  const reading = readOrStop("a");
  await settle();
  for (let at = 0; at < 2; at++) await pass(3);
  assert.equal(speeches.length, 1);
  stopReading();
  await reading;
  refusals = [full(3600)];
  await assert.rejects(readOrStop("a"), /Full/);
  refusals = Array.from({ length: 9 }, () => full());
  const failing = assert.rejects(readOrStop("a"), /Full/);
  for (let at = 0; at < 5; at++) await pass(3);
  await failing;
  refusals = [];
});

test("an answer that is being written is read sentence by sentence, with what it said before its calls", async () => {
  const answer = await shows("", { state: "writing" });
  const reading = readOrStop("a");
  const grow = async (fields: Partial<Message>) => {
    showLive({ ...answer, ...fields });
    await settle();
    await pass(0.2);
  };
  await grow({ content: "I will lo" });
  assert.equal(speeches.length, 0);
  const steps = [{ content: "I will look.", reasoning: "Hm. Look.", calls: [] }];
  await grow({ steps });
  speeches[0]!.sound.close();
  await grow({ steps, content: "Found. It is" });
  speeches[1]!.sound.close();
  await grow({ steps, content: "Found. It is so" });
  endLive({ ...answer, steps, content: "Found. It is so", state: "done" });
  await pass(0.2);
  speeches[2]!.sound.close();
  await pass(1);
  await reading;
  assert.deepEqual(speeches.map(({ body }) => body.input), ["I will look.", "Found.", "It is so."]);
});

test("a browser without sound says so, and reads the next time", async () => {
  await shows("One.");
  mock.method(Card.prototype, "createBufferSource", () => { throw new Error("no sound card"); }, { times: 1 });
  const reading = assert.rejects(readOrStop("a"), /no sound card/);
  await settle();
  speeches[0]!.sound.enqueue(sound(1));
  await reading;
  assert.equal(readAloud.peek(), "");
  assert.ok(speeches[0]!.signal.aborted);
  mock.method(Card.prototype, "resume", async () => undefined, { times: 1 });
  const silent = assert.rejects(readOrStop("a"), /plays no sound/);
  await settle();
  speeches[1]!.sound.enqueue(sound(20));
  speeches[1]!.sound.close();
  await settle();
  for (let second = 0; second < 10; second += 5) {
    mock.timers.tick(5000);
    await settle();
  }
  await silent;
});

test("an answer without words says so", async () => {
  await shows("```\ncode.\n```");
  await assert.rejects(readOrStop("a"), /no text/);
  assert.deepEqual([speeches.length, readAloud.peek()], [0, ""]);
});

test("a voice that the model does not have is not asked for", async () => {
  await shows("One.");
  fake.routes.set("GET /v1/audio/voices", () => ({ body: { voices: [{ id: "default", name: "Default" }, { id: "anna", name: "Anna" }] } }));
  for (const [voice, asked] of [["anna", "anna"], ["gone", "default"]] as const) {
    settings.value = { ...defaults, voice };
    const reading = readOrStop("a");
    await settle(60);
    assert.equal(speeches.at(-1)!.body.voice, asked);
    stopReading();
    await reading;
  }
});

