/** The open parts of the screen: the sidebar, the activity panel, a dialog. */

import { computed, effect, signal } from "@preact/signals";

import { place } from "../state/storage";
import { media } from "./media";

/** A part of the settings. */
export type Section = "chat" | "all" | "presets" | "general" | "mcp" | "data";

/** The overlay that is open: a section of the settings, the form to load a model, another one, or none. */
export type Overlay = { settings: Section } | { load: string } | "help" | "draw" | "models" | null;

/** True if the sidebar fits beside the conversation; otherwise it covers it. */
export const wide = media("(min-width: 56rem)");

/** True if the activity panel fits beside the conversation as well. */
export const roomy = media("(min-width: 76rem)");

/** True with an on-screen keyboard, where Enter begins a new line. */
export const touch = media("(hover: none) and (pointer: coarse)");

/** A sidebar that fits beside the conversation stays open or closed across reloads. */
const pinned = signal(recall("sidebar") !== "hidden");
const drawn = signal(false);
effect(() => remember("sidebar", pinned.value ? "shown" : "hidden"));

export const sidebarShown = computed(() => (wide.value ? pinned.value : drawn.value));
export const activityShown = signal(roomy.value && recall("activity") === "shown");
effect(() => remember("activity", activityShown.value ? "shown" : "hidden"));
export const overlay = signal<Overlay>(null);

/** Show or hide the sidebar. */
export function showSidebar(shown: boolean): void {
  if (wide.value) pinned.value = shown;
  else drawn.value = shown;
}

/** Hide what lies over the conversation where there is no room beside it; false: nothing does. */
export function uncover(): boolean {
  const covered = (!wide.value && drawn.value) || (!roomy.value && activityShown.value);
  drawn.value = false;
  if (!roomy.value) activityShown.value = false;
  return covered;
}

/** Put the cursor where a message is written. */
export function focusComposer(): void {
  document.getElementById("message")?.focus();
}

/** Put the focus on the first call of a tool that waits for approval; false: none does. */
export function focusAsked(): boolean {
  const button = document.querySelector<HTMLElement>(".call .allow:not(:disabled)");
  button?.focus();
  return button !== null;
}

/** Give the focus back when what had it is gone. On glass, that would bring up the keyboard. */
export function focusAgain(): void {
  if (!touch.value) focusComposer();
}

/** Put the cursor where chats are searched. */
export function focusSearch(): void {
  showSidebar(true);
  requestAnimationFrame(() => document.getElementById("search")?.focus());
}

/** The value remembered under a name; null without a value, or if the browser blocks storage. */
export function recall(name: string): string | null {
  try {
    return sessionStorage.getItem(place(name)) ?? localStorage.getItem(place(name));
  } catch {
    return null; // storage is blocked: the page works without
  }
}

/** Remember a small thing: in this tab, or in this browser. */
export function remember(name: string, value: string, where: "tab" | "browser" = "browser"): void {
  try {
    (where === "tab" ? sessionStorage : localStorage).setItem(place(name), value);
  } catch {
    // Storage is blocked or full. What is remembered here is a convenience.
  }
}
