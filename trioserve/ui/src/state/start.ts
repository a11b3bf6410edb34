// Starts what the state is made of.

import { listenToBrowser } from "../server/wake";
import { newChat } from "./chats";
import { checkOthers, isFollowing, look, startChecking } from "./runs";
import { startServer } from "./server";
import { startSettings } from "./settings";
import { loadChats, openChat, refresh } from "./shown";
import { startTabs } from "./tabs";

/** Read what is kept, take up the answers that are still being written, and connect. Called once; `newChat` or `open` follows. */
export async function start(): Promise<void> {
  startSettings();
  listenToBrowser();
  startServer();
  await loadChats();
  startTabs({
    onChanged: (chat) => void takeIn(chat),
    onWritten: () => void look(),
    onBye: () => void checkOthers(0),
    isFollowing,
  });
  startChecking();
  void look();
}

/** Another tab has changed a chat. */
async function takeIn(chat: string): Promise<void> {
  const wasOpen = openChat.peek()?.chat.id === chat;
  await refresh(chat);
  await look();
  if (wasOpen && !openChat.peek()) newChat(); // it was deleted
}
