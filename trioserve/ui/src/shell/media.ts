/** Media queries: the size of the window and its color scheme. */

import { signal, type ReadonlySignal } from "@preact/signals";

import { settings } from "../state/settings";

/** A signal that is true while the window matches a media query. */
export function media(query: string): ReadonlySignal<boolean> {
  const list = matchMedia(query);
  const matches = signal(list.matches);
  list.addEventListener("change", () => (matches.value = list.matches));
  return matches;
}

let systemIsDark: ReadonlySignal<boolean> | undefined;

/** True if the page is dark, by the settings or the system. */
export function isDark(): boolean {
  const { theme } = settings.value;
  if (theme !== "auto") return theme === "dark";
  return (systemIsDark ??= media("(prefers-color-scheme: dark)")).value;
}
