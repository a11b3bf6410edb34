// Starts what the state is made of.

import { listenToBrowser } from "../server/wake";
import { startCalls } from "./calls";
import { startMcp } from "./mcp";
import { startOutbox } from "./outbox";
import { stopReading } from "./reading";
import { checkOthers, isFollowing, look, runOf, showRun, startChecking } from "./runs";
import { hasProxy, startServer } from "./server";
import { loadChats, refresh } from "./shown";
import { startTabs } from "./tabs";
import { startTitles } from "./titles";

/**
 * Read the chats, take up the answers that are still being written, and connect. Called once;
 * `newChat` or `open` follows, and again whenever another tab deletes the chat that is open.
 */
export async function start(): Promise<void> {
  listenToBrowser();
  startServer();
  await loadChats();
  startTabs({
    onChanged: (chat) => void refresh(chat).then(look),
    onWritten: () => void look(),
    onRun: showRun,
    onBye: () => void checkOthers(0),
    onReading: stopReading,
    isFollowing,
    runOf,
  });
  startChecking();
  startMcp(hasProxy);
  startCalls();
  startOutbox();
  startTitles();
  void look();
}
