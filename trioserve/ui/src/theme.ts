// Runs before anything is drawn, so that the page does not appear in one theme and change to another.

import { place } from "./state/place";

/** The theme that was chosen here or else by the server; none: as the system has it. */
export function keptTheme(): string | undefined {
  try {
    const kept = (name: string) => JSON.parse(localStorage.getItem(place(name)) ?? "null");
    const { theme } = { ...kept("defaults"), ...kept("settings") };
    return theme === "light" || theme === "dark" ? theme : undefined;
  } catch {
    return undefined; // storage is blocked, or holds what something else has written
  }
}

const theme = keptTheme();
if (theme) document.documentElement.dataset.theme = theme;
