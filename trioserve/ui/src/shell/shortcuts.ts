/** Carries out what the keyboard's shortcuts say. */

import { chats, openChat } from "../state/chats";
import { stopReading } from "../state/reading";
import { runs } from "../state/runs";
import { stop } from "../state/talk";
import { type Command, isMac, shortcutOf } from "./keys";
import { goTo } from "./route";
import { attempt } from "./toasts";
import { activityShown, focusComposer, focusSearch, overlay, showSidebar, sidebarShown, uncover } from "./view";

/** True if ⌘ takes the place of Ctrl. */
export const mac = isMac(navigator.platform);

/** Begin a chat, with the cursor where it is written. */
export function startChat(): void {
  goTo(null);
  focusComposer();
}

/** Listen to the keyboard until the function that is returned is called. */
export function listenToKeys(): () => void {
  addEventListener("keydown", onKey);
  return () => removeEventListener("keydown", onKey);
}

function onKey(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.isComposing) return;
  // Dialogs over the page have separate keys.
  if (document.querySelector("dialog[open], [popover]:popover-open")) return;
  const shortcut = shortcutOf(event, isWritten(event.target), mac);
  if (shortcut && commands[shortcut.command]() !== false) event.preventDefault();
}

function isWritten(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.matches("input, textarea, select, [contenteditable]");
}

/** The action of each shortcut; false: it did nothing, and the key is the browser's. */
const commands: Record<Command, () => void | boolean> = {
  "new-chat": startChat,
  search: focusSearch,
  sidebar: () => showSidebar(!sidebarShown.value),
  activity: () => void (activityShown.value = !activityShown.value),
  settings: () => void (overlay.value = { settings: "general" }),
  help: () => void (overlay.value = "help"),
  write: focusComposer,
  "previous-chat": () => step(-1),
  "next-chat": () => step(1),
  stop: () => {
    if (uncover()) return true;
    const wasReading = stopReading();
    const chat = openChat.value?.chat.id;
    if (!chat || !runs.value.has(chat)) return wasReading;
    void attempt(() => stop(chat));
    return true;
  },
};

/** Open the chat above or below the open one. */
function step(by: 1 | -1): boolean {
  const list = chats.value;
  const at = list.findIndex((chat) => chat.id === openChat.value?.chat.id);
  const to = list[at < 0 ? (by > 0 ? 0 : -1) : at + by];
  if (!to) return false;
  goTo(to.id);
  return true;
}
