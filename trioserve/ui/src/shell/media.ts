/** What the window is like. */

import { signal, type ReadonlySignal } from "@preact/signals";

import { settings } from "../state/settings";

/** Whether the window is as a media query says, now and later. */
export function media(query: string): ReadonlySignal<boolean> {
  const list = matchMedia(query);
  const matches = signal(list.matches);
  list.addEventListener("change", () => (matches.value = list.matches));
  return matches;
}

let systemIsDark: ReadonlySignal<boolean> | undefined;

/** Whether the page is light text on a dark ground. */
export function isDark(): boolean {
  const { theme } = settings.value;
  if (theme !== "auto") return theme === "dark";
  return (systemIsDark ??= media("(prefers-color-scheme: dark)")).value;
}
