/** The keyboard's shortcuts: which there are, and whether a key is one of them. */

import type { Text } from "../words";

/** The action of a shortcut. */
export type Command =
  | "new-chat"
  | "search"
  | "sidebar"
  | "activity"
  | "settings"
  | "previous-chat"
  | "next-chat"
  | "write"
  | "stop"
  | "help";

/** A key with its modifiers; `mod` is Ctrl, or ⌘ on a Mac. */
export interface Shortcut {
  command: Command;
  key: string;
  mod?: boolean;
  shift?: boolean;
  alt?: boolean;
  /** Also where text is written. */
  whileWriting: boolean;
  says: Text;
}

export const shortcuts: readonly Shortcut[] = [
  { command: "new-chat", mod: true, shift: true, key: "o", whileWriting: true, says: "New chat" },
  { command: "search", mod: true, key: "k", whileWriting: true, says: "Search the chats" },
  { command: "previous-chat", alt: true, key: "ArrowUp", whileWriting: true, says: "The chat above" },
  { command: "next-chat", alt: true, key: "ArrowDown", whileWriting: true, says: "The chat below" },
  { command: "write", key: "/", whileWriting: false, says: "Write a message" },
  { command: "stop", key: "Escape", whileWriting: true, says: "Stop the answer, and reading aloud" },
  { command: "sidebar", mod: true, key: "b", whileWriting: true, says: "Show or hide the chats" },
  { command: "activity", mod: true, key: "j", whileWriting: true, says: "Show or hide the activity" },
  { command: "settings", mod: true, key: ",", whileWriting: true, says: "Settings" },
  { command: "help", key: "?", whileWriting: false, says: "This list" },
];

/** The fields of a KeyboardEvent that count. */
export type Press = Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "shiftKey" | "altKey">;

/** The shortcut that a key is, if it is one. Where text is written, plain keys are text. */
export function shortcutOf(press: Press, writing: boolean, mac: boolean): Shortcut | undefined {
  const mod = mac ? press.metaKey : press.ctrlKey;
  const other = mac ? press.ctrlKey : press.metaKey;
  if (other) return undefined;
  return shortcuts.find((one) => {
    if (writing && !one.whileWriting) return false;
    if (press.key.toLowerCase() !== one.key.toLowerCase()) return false;
    // "?" needs Shift on some keyboards and not on others.
    const shiftFits = one.key.length > 1 || one.mod ? press.shiftKey === !!one.shift : true;
    return mod === !!one.mod && press.altKey === !!one.alt && shiftFits;
  });
}

/** The keys of a shortcut as a list shows them. */
export function keyNames(one: Pick<Shortcut, "key" | "mod" | "shift" | "alt">, mac: boolean): string[] {
  const named: Record<string, string> = { ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };
  const names = [];
  if (one.mod) names.push(mac ? "⌘" : "Ctrl");
  if (one.alt) names.push(mac ? "⌥" : "Alt");
  if (one.shift) names.push(mac ? "⇧" : "Shift");
  names.push(named[one.key] ?? (one.key.length === 1 ? one.key.toUpperCase() : one.key));
  return names;
}

/** True on a Mac, an iPhone or an iPad, by the platform that the browser names. */
export function isMac(platform: string): boolean {
  return /mac|iphone|ipad/i.test(platform);
}
