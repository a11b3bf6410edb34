// The parts of a conversation that are drawn, and when.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Window } from "happy-dom";
import { render, type ComponentType } from "preact";

import type { Chat, Message } from "../types";

const window = new Window({ url: "http://localhost:8080/" });
const chat: Chat = { id: "c", title: "A chat", createdAt: 0, updatedAt: 0, leaf: "a", system: "", sampling: {}, model: "" };

class Observer {
  observe(): void {}
  disconnect(): void {}
}

function message(id: string, parent: string | null, role: Message["role"], content: string): Message {
  const rest = { reasoning: "", toolCalls: [], attachments: [], model: "", createdAt: 0 };
  return { ...rest, id, chat: "c", parent, role, content, state: "done" };
}

/** Until what is to be drawn has been drawn. */
async function drawn(): Promise<void> {
  await new Promise((resolve) => setTimeout(resolve, 100));
}

let place: HTMLElement;
let shown: typeof import("../state/shown");

before(async () => {
  const { document, localStorage, sessionStorage } = window;
  const rest = { IntersectionObserver: Observer, ResizeObserver: Observer, requestAnimationFrame: setTimeout };
  const media = () => ({ matches: false, addEventListener: () => undefined });
  Object.assign(globalThis, { window, document, localStorage, sessionStorage, matchMedia: media, location: window.location, ...rest });
  shown = await import("../state/shown");
  const { Conversation } = await import("./Conversation");
  place = document.createElement("main") as unknown as HTMLElement;
  render(((Shown: ComponentType) => <Shown />)(Conversation), place);
});

after(() => render(null, place));

function open(path: Message[], id = "c"): void {
  shown.openChat.value = { chat: { ...chat, id }, path, branches: new Map() };
}

test("an answer is drawn as it is written, though its chat was drawn before", async () => {
  const answer: Message = { ...message("a", "q", "assistant", ""), state: "writing" };
  open([message("q", null, "user", "Hello?"), answer]);
  await drawn();
  assert.match(place.textContent ?? "", /Hello\?/);
  shown.showLive(answer);
  open([message("q", null, "user", "Hello?"), answer]);
  await drawn();
  shown.showLive({ ...answer, content: "Hello **you" });
  await drawn();
  assert.equal(place.querySelector(".answer strong")?.textContent, "you");
  shown.endLive({ ...answer, content: "Hello **you**!", state: "done" });
  open([message("q", null, "user", "Hello?"), { ...answer, content: "Hello **you**!", state: "done" }]);
  await drawn();
  assert.equal(place.querySelector(".answer .prose")?.textContent, "Hello you!");
  assert.ok(place.querySelector(".answer [aria-label='Regenerate']"));
});

test("of a long conversation the last messages are drawn, and earlier ones when they are asked for", async () => {
  const path = Array.from({ length: 100 }, (_, at) =>
    message(`m${at}`, at ? `m${at - 1}` : null, at % 2 ? "assistant" : "user", `Number ${at}`),
  );
  open(path, "another");
  await drawn();
  assert.equal(place.querySelectorAll(".message").length, 20);
  assert.match(place.textContent ?? "", /Number 99/);
  for (const expected of [40, 60, 80, 100]) {
    place.querySelector<HTMLElement>(".earlier")?.click();
    await drawn();
    assert.equal(place.querySelectorAll(".message").length, expected);
  }
  assert.equal(place.querySelector(".earlier"), null);
});
