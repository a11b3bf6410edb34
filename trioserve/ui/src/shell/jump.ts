/** The way to a message of a chat, wherever it is. */

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
