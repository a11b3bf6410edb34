// What a person does in the open chat.

import type { Attachment, Chat, Message } from "../types";
import { t } from "../words";
import { chosenModel } from "./choice";
import { newId } from "./ids";
import { bodyFor } from "./prompt";
import { stopRuns, write } from "./runs";
import { settings } from "./settings";
import { change, openChat, openTree } from "./shown";
import { toolsFor } from "./tools";
import { childrenOf, leafOf, pathTo, subtreeOf, timeFor } from "./tree";
import type { Body, Unwritten } from "./writer";

/** Characters of a title that is taken from the first message. */
const TITLE_LENGTH = 60;

/**
 * Send a message in the open chat, and have it answered. Returns once the message is kept, not
 * when the answer is complete. Throws an Error for people if it cannot be sent.
 */
export async function send(text: string, attachments: Attachment[]): Promise<void> {
  const { chat } = opened();
  if (!text.trim() && attachments.length === 0) throw new Error(t("There is nothing to send."));
  await stopRuns(chat.id);
  await ask(question(chat.id, chat.leaf, text, attachments));
}

/** End the answer that a chat is being given. Its received part stays. */
export async function stop(chat: string): Promise<void> {
  await stopRuns(chat);
}

/** Answer once more, beside the answer that there is. */
export async function regenerate(message: string): Promise<void> {
  const { id, role, parent } = found(message);
  await stopRuns(opened().chat.id);
  await answer(role === "assistant" ? parent : id, []);
}

/** Put a changed message beside the one that there is; a changed question is answered. */
export async function edit(
  message: string,
  text: string,
  attachments: Attachment[],
): Promise<void> {
  const before = found(message);
  const { chat } = opened();
  await stopRuns(chat.id);
  if (before.role === "user") {
    await ask(question(chat.id, before.parent, text, attachments));
    return;
  }
  const { stats: _, finish: __, error: ___, stream: ____, ...rest } = before;
  const createdAt = timeFor(openTree(), before.parent);
  const changed: Message = { ...rest, id: newId(), content: text, state: "done", createdAt };
  await change(chat.id, { leaf: changed.id, updatedAt: Date.now() }, [changed]);
}

/** Show the branch that a message is in, as far as it goes. */
export async function showBranch(message: string): Promise<void> {
  const { id } = found(message);
  await change(opened().chat.id, { leaf: leafOf(openTree(), id) });
}

/** Let the model continue an answer that was stopped, failed, or is too short. */
export async function continueAnswer(message: string): Promise<void> {
  const before = found(message);
  const { chat } = opened();
  if (before.role !== "assistant") throw new Error(t("Only an answer can be continued."));
  if (before.toolCalls.length > 0) throw new Error(t("An answer that calls tools cannot be continued."));
  await stopRuns(chat.id);
  const { stats: _, finish: __, error: ___, ...rest } = before;
  const now = Date.now();
  const unwritten: Unwritten = { ...rest, state: "writing", stream: streamFor(chat.id, now) };
  const isKept = change(chat.id, { leaf: before.id, updatedAt: now }, [unwritten]);
  const hasText = Boolean(before.content || before.reasoning);
  const path = pathTo(openTree(), hasText || before.steps ? before.id : before.parent);
  void write(unwritten, bodyOf(chat, path, hasText));
  await isKept;
}

/**
 * Delete a message and all that follows it; a sibling is shown in its place, if there is one. What
 * it returns brings them back.
 */
export async function removeMessage(message: string): Promise<() => Promise<void>> {
  const { id, parent } = found(message);
  const { chat } = opened();
  await stopRuns(chat.id);
  const tree = openTree();
  const gone = subtreeOf(tree, id);
  const sibling = childrenOf(tree, parent).filter((one) => one.id !== id).pop();
  const leaf = sibling ? leafOf(tree, sibling.id) : parent;
  await change(chat.id, { leaf }, [], gone.map((one) => one.id));
  return async () => {
    await change(chat.id, { leaf: chat.leaf }, gone);
  };
}

// -- the parts

function opened(): { chat: Chat } {
  const shown = openChat.peek();
  if (!shown) throw new Error(t("No chat is open."));
  return shown;
}

function found(id: string): Message {
  const message = openTree().get(id);
  if (!message) throw new Error(t("This message is no longer there."));
  return message;
}

function question(
  chat: string,
  parent: string | null,
  content: string,
  attachments: Attachment[],
): Message {
  return {
    id: newId(),
    chat,
    parent,
    role: "user",
    content,
    reasoning: "",
    toolCalls: [],
    attachments,
    model: "",
    createdAt: timeFor(openTree(), parent),
    state: "done",
  };
}

async function ask(asked: Message): Promise<void> {
  await answer(asked.id, [asked]);
}

/** Add messages to the open chat, and have the last of them answered. */
async function answer(parent: string | null, added: Message[]): Promise<void> {
  const { chat } = opened();
  const now = Date.now();
  const model = chosenModel.peek();
  const unwritten: Unwritten = {
    id: newId(),
    chat: chat.id,
    parent,
    role: "assistant",
    content: "",
    reasoning: "",
    toolCalls: [],
    attachments: [],
    model,
    createdAt: timeFor(openTree(), parent),
    state: "writing",
    stream: streamFor(chat.id, now),
  };
  const title = chat.title || titleFrom(added[0]);
  const how = { title, leaf: unwritten.id, updatedAt: now };
  // What is written of the answer gets to the database after this, and so finds the message there.
  const isKept = change(chat.id, how, [...added, unwritten]);
  void write(unwritten, bodyOf(chat, pathTo(openTree(), parent), false));
  await isKept;
}

function bodyOf(chat: Chat, path: Message[], continues: boolean): Body {
  const { system, sampling } = settings.peek();
  const asked = {
    system: chat.system || system,
    sampling: { ...sampling, ...chat.sampling },
    model: chosenModel.peek(),
    tools: continues ? {} : toolsFor(chat), // the server runs none for an answer that has begun
    path,
    continues,
  };
  return () => bodyFor(asked);
}

/**
 * Each attempt has a separate conversation, so that what the server has of another is not taken
 * for it.
 */
function streamFor(chat: string, now: number): Unwritten["stream"] {
  return { conversation: `${chat}.${newId()}`, offset: 0, startedAt: now };
}

function titleFrom(message: Message | undefined): string {
  const text = message?.content.trim() || message?.attachments[0]?.name || "";
  const [line = ""] = text.split("\n");
  const characters = Array.from(line.trim());
  if (characters.length <= TITLE_LENGTH) return line.trim();
  return `${characters.slice(0, TITLE_LENGTH).join("").trimEnd()}…`;
}
