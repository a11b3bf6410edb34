/** The open chat is in the address of the page, so that a reload, a bookmark and “back” find it. */

import { effect } from "@preact/signals";

import { newChat, open, openChat } from "../state/chats";
import { t } from "../words";
import { NEW, chatOf, linkTo } from "./address";
import { attempt, say } from "./toasts";

/** Go to a chat; null: to one that is new. */
export function goTo(chat: string | null): void {
  const to = chat === null ? NEW : linkTo(chat);
  if (location.hash !== to) location.hash = to;
}

/** Open what the address says, and keep the two together from now on. */
export async function startRouting(): Promise<void> {
  await follow();
  addEventListener("hashchange", () => void attempt(follow));
  effect(() => {
    const now = openChat.value;
    if (!now) {
      queueMicrotask(replaceLost);
      return;
    }
    const to = now.path.length ? linkTo(now.chat.id) : NEW;
    // A chat gets its address with its first message; that is not a step to come back from.
    if (location.hash !== to) history.replaceState(null, "", to);
  });
}

/** Another tab has deleted the chat that was open here. */
function replaceLost(): void {
  if (openChat.peek()) return;
  newChat();
  say(t("This chat was deleted in another tab."));
}

async function follow(): Promise<void> {
  const chat = chatOf(location.hash);
  const current = openChat.peek();
  if (chat === null) {
    if (!current || current.path.length) newChat();
  } else if (current?.chat.id !== chat && !(await open(chat))) {
    newChat();
    say(t("There is no such chat in this browser."));
  }
}
