// The server's calls, as drawn.

import assert from "node:assert/strict";
import { before, beforeEach, test } from "node:test";

import { Window } from "happy-dom";
import { render } from "preact";
import type { ComponentType } from "preact";

import type { MadeCall, Message } from "../types";

const window = new Window({ url: "http://localhost:8080/" });

let Steps: ComponentType<{ message: Message }>;
let place: HTMLElement;
const sent: [string, unknown][] = [];

before(async () => {
  const { document, localStorage, sessionStorage } = window;
  const rest = { requestAnimationFrame: setTimeout, matchMedia: () => ({ matches: false, addEventListener: () => undefined }) };
  Object.assign(globalThis, { window, document, localStorage, sessionStorage, HTMLElement: window.HTMLElement, ...rest });
  globalThis.fetch = async (url, options) => {
    sent.push([new URL(String(url)).pathname, JSON.parse(options?.body as string)]);
    return Response.json({ success: true });
  };
  ({ Steps } = await import("./Calls"));
});

beforeEach(() => {
  sent.length = 0;
  place = window.document.createElement("main") as unknown as HTMLElement;
  window.document.body.replaceChildren(place as never);
});

const call = (more: Partial<MadeCall>): MadeCall => ({
  id: "a", name: "edit_file", title: "Edit file", arguments: '{"path":"x.txt"}', writes: true, state: "done", ...more,
});

function draw(calls: MadeCall[], state: Message["state"] = "writing"): void {
  const stream = { conversation: "c", offset: 0, startedAt: 0, id: "chatcmpl-1" };
  const rest = { reasoning: "", toolCalls: [], attachments: [], model: "", createdAt: 0, parent: null, content: "" };
  const steps = [{ content: "", reasoning: "", calls }];
  render(<Steps message={{ ...rest, id: "m", chat: "c", role: "assistant", state, stream, steps }} />, place);
}

const button = (name: string) =>
  [...place.querySelectorAll<HTMLButtonElement>("button")].find((one) => one.textContent === name);
const soon = () => new Promise((resolve) => setTimeout(resolve, 20));

test("a call that waits shows what it would change, and takes an answer once", async () => {
  draw([call({ state: "asked", preview: "@@ -1 +1 @@\n-old\n+new" })]);
  assert.equal(place.querySelector("ins")?.textContent, "+new\n");
  assert.equal(place.querySelector("del")?.textContent, "−old\n");
  button("Allow")!.click();
  await soon();
  assert.ok(button("Allow")!.disabled && button("Deny")!.disabled);
  assert.deepEqual(sent, [["/v1/chat/completions/chatcmpl-1/approve", { call_id: "a", approve: true }]]);
});

test("who approves sees both ends of a change and of its long lines, and can unfold all of it", async () => {
  const middle = "y".repeat(1_500) + "middle" + "y".repeat(1_500);
  const lines = [`${middle} end of a line`, ...Array.from({ length: 3_998 }, (_, at) => `line ${at}`), "the end"];
  draw([call({ state: "asked", preview: `@@ -0,0 +1,4000 @@\n${lines.map((line) => `+${line}\n`).join("")}` })]);
  const note = place.querySelector(".unshown")!;
  assert.match(note.textContent ?? "", /does not show 3,801 of its lines, the middle of 1 long line\./);
  assert.ok(note.compareDocumentPosition(button("Allow") as never) & 4, "it is above the buttons");
  const shown = () => [...place.querySelectorAll("ins")].map((one) => one.textContent);
  assert.match(shown()[0]!, /^\+y{1000}Show 1,020 hidden charactersy+ end of a line\n$/);
  assert.equal(shown().at(-1), "+the end\n");
  assert.match(place.querySelector("code > .folded")?.textContent ?? "", /^Show 3,801 hidden lines \(\d\d,\d\d\d characters\)$/);
  button("Show all")!.click();
  for (let turn = 0; shown().length < lines.length && turn < 100; turn += 1) await soon();
  assert.deepEqual(shown(), lines.map((line) => `+${line}\n`));
  assert.equal(place.querySelector(".unshown, .folded"), null);
});

test("who approves learns what the server leaves out of a preview, and can read the whole call", async () => {
  const preview = "@@ -0,0 +1,9 @@\n+one\n[7 lines with 70 characters are not shown]\n@@ -0 +9 @@\n+nine\n";
  const content = "all of it\n".repeat(9);
  draw([call({ state: "asked", preview, arguments: JSON.stringify({ path: "x.txt", content }) })]);
  assert.match(place.querySelector(".unshown")?.textContent ?? "", /does not show a part of the change\./);
  button("Show the whole call")!.click();
  await soon();
  assert.ok([...place.querySelectorAll("dd")].some((one) => one.textContent === content));
  assert.equal(button("Show the whole call"), undefined);
});

test("a preview without lines is not the whole call, and one that is whole needs no note", () => {
  draw([call({ state: "asked", preview: "Files a/x and b/x differ\n" })]);
  assert.match(place.querySelector(".unshown")?.textContent ?? "", /does not show the change\./);
  draw([call({ state: "asked", preview: "@@ -1 +1 @@\n-old\n+[7 lines are not shown]" })]);
  assert.equal(place.querySelector(".unshown"), null);
});

test("a call can be denied, and one that runs be stopped", async () => {
  draw([call({ state: "asked" }), call({ id: "b", state: "running", output: "so far" })]);
  assert.match(place.querySelector(".output")?.textContent ?? "", /so far/);
  button("Deny")!.click();
  button("Stop this")!.click();
  await soon();
  assert.deepEqual(sent.map(([path, body]) => [path.split("/").pop(), body]), [
    ["approve", { call_id: "a", approve: false }],
    ["stop", { call_id: "b" }],
  ]);
});

test("nothing can be done with a call whose answer has ended", () => {
  draw([call({ state: "asked" }), call({ id: "b", state: "running" })], "stopped");
  assert.deepEqual([button("Allow"), button("Stop this")], [undefined, undefined]);
  assert.equal(place.textContent?.match(/stopped/g)?.length, 2);
});

test("what is hostile in a tool’s words stays text, and short", async () => {
  const evil = "<img src=x onerror=alert(1)>\u202e\u001b[31m";
  const diff = `@@ -1,0 +1,100000 @@\n${`+${evil}\n`.repeat(100_000)}`;
  draw([
    call({ title: `Edit\u202e${evil}`, diff }),
    call({ id: "b", state: "failed", result: JSON.stringify({ error: evil.repeat(50_000) }) }),
    call({ id: "c", state: "failed", result: `${evil}\n`.repeat(30_000), arguments: JSON.stringify({ command: evil }) }),
    call({ id: "d", state: "running", output: evil.repeat(1_000) }),
  ]);
  for (const line of place.querySelectorAll<HTMLElement>(".call > .fold[aria-expanded=false]")) line.click();
  await soon();
  assert.equal(place.querySelector("img"), null);
  assert.equal(place.textContent?.includes("\u202e") || place.textContent?.includes("\u001b"), false);
  assert.equal(place.querySelectorAll(".diff-line").length, 200);
  assert.match(place.textContent ?? "", /Show 99,801 hidden lines/);
  assert.ok(place.textContent!.length < 200_000, "more than a page bears");
});
