// Runs before anything is drawn, so that the page does not appear in one way and change to another.

import { place } from "./state/place";

/** The theme that was chosen here or else by the server; none: as the system has it. */
export function keptTheme(): string | undefined {
  try {
    const { theme } = { ...parsed("defaults"), ...parsed("settings") };
    return theme === "light" || theme === "dark" ? theme : undefined;
  } catch {
    return undefined; // something else has written there
  }
}

function parsed(name: string): { theme?: unknown } | null {
  return JSON.parse(kept(name) ?? "null");
}

function kept(name: string): string | null {
  try {
    return sessionStorage.getItem(place(name)) ?? localStorage.getItem(place(name));
  } catch {
    return null; // storage is blocked
  }
}

const { dataset } = document.documentElement;
const theme = keptTheme();
if (theme) dataset.theme = theme;
if (kept("sidebar") === "hidden") dataset.sidebar = "hidden";
