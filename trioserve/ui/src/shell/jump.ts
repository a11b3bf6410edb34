/** Opens the chat and the branch of a message, and scrolls to it. */

import { signal } from "@preact/signals";

import { goTo } from "./route";
import { uncover } from "./view";

/** The message that is to be shown once its chat is open. */
export const target = signal<{ chat: string; message: string } | null>(null);

export function goToMessage(chat: string, message: string): void {
  target.value = { chat, message };
  goTo(chat);
  uncover();
}
