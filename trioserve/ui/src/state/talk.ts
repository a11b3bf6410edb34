// A person's actions in the open chat.

import type { Attachment, Chat, Message } from "../types";
import { t } from "../words";
import { modelOf } from "./choice";
import { sentOf, systemWith } from "./context";
import { reading } from "./db";
import { areTooLong } from "./lengths";
import { newId } from "./ids";
import { bodyFor, DENIED } from "./prompt";
import { stopReading } from "./reading";
import { stopRuns, write } from "./runs";
import { contextSizeOf, props } from "./server";
import { settings } from "./settings";
import { change, chatOf, checkIsCurrent, openChat, openTree } from "./shown";
import { toolsFor } from "./tools";
import { childrenOf, leafOf, pathTo, subtreeOf, timeFor, treeOf, type Tree } from "./tree";
import type { Body, Unwritten } from "./writer";

/** Characters of a title that is taken from the first message. */
const TITLE_LENGTH = 60;

/**
 * Send a message in the open chat, or in another one, and have it answered. Returns once the message is kept, not
 * when the answer is complete. Throws an Error for people if it cannot be sent.
 */
export async function send(text: string, attachments: Attachment[], id = opened().chat.id): Promise<void> {
  if (!text.trim() && attachments.length === 0) throw new Error(t("There is nothing to send."));
  if (chatOf(id)?.leaf) await checkIsCurrent(id);
  await stopRuns(id);
  const place = isOpen(id) ? opened() : await keptPlace(id);
  await ask(place, question(place, place.chat.leaf, text, attachments));
}

/** True if documents exceed the context, so that the question gets parts of them. */
function isForParts({ chat, tree }: Place, { parent, attachments }: Message): boolean {
  if (!props.peek()?.endpoint_embeddings) return false;
  const size = contextSizeOf(modelOf(chat));
  return areTooLong(attachments.filter(({ data }) => !data), size) || pathTo(tree, parent).some(({ parts }) => parts);
}

/** Choose the parts of documents that a question gets. */
async function withParts({ chat, tree }: Place, asked: Message): Promise<Message> {
  const { documentsIn, partsFor } = await import("./documents");
  const model = modelOf(chat);
  const documents = [...documentsIn(pathTo(tree, asked.parent)), ...asked.attachments.filter(({ data }) => !data)];
  return { ...asked, parts: await partsFor(asked.content, documents, contextSizeOf(model), model) };
}

/** End the answer that a chat is being given, and reading aloud. Its received part stays. */
export async function stop(chat: string): Promise<void> {
  stopReading();
  await stopRuns(chat);
}

/** Answer once more, beside the answer that there is; with another model, if it is named. */
export async function regenerate(message: string, model?: string): Promise<void> {
  const { id, role, parent } = found(message);
  await stopRuns(opened().chat.id);
  await answer(opened(), role === "assistant" ? parent : id, [], model);
}

/** An attached file of the open chat. */
export function documentOf(id: string): Attachment | undefined {
  return [...openTree().values()].flatMap(({ attachments }) => attachments).find((one) => one.id === id);
}

/** Another version of a message of the open chat. */
export function versionOf(message: string): Message | undefined {
  return openTree().get(message);
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
    const place = opened();
    await ask(place, question(place, before.parent, text, attachments));
    return;
  }
  const { stats: _, finish: __, error: ___, stream: ____, odds: _____, ...rest } = before;
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

/** Give the results of an answer's calls to the model, in their order; null: the call was not allowed. */
export async function giveResults(message: Message, results: (string | null)[]): Promise<void> {
  const place = isOpen(message.chat) ? opened() : await keptPlace(message.chat);
  let parent = message.id;
  const added = results.map((result, index): Message => {
    const one = { ...question(place, parent, result ?? DENIED, []), role: "tool" as const, ...(result === null ? { state: "stopped" as const } : {}) };
    one.createdAt += index;
    parent = one.id;
    return one;
  });
  await answer(place, parent, added);
}

// -- the parts

/** A chat, and its messages on all branches. */
interface Place {
  chat: Chat;
  tree: Tree;
}

function opened(): Place {
  const shown = openChat.peek();
  if (!shown) throw new Error(t("No chat is open."));
  return { chat: shown.chat, tree: openTree() };
}

function isOpen(id: string): boolean {
  return openChat.peek()?.chat.id === id;
}

/** The same of a chat that is not open. */
async function keptPlace(id: string): Promise<Place> {
  const chat = chatOf(id);
  if (!chat) throw new Error(t("This chat is no longer there."));
  return { chat, tree: treeOf(await reading((tx) => tx.messagesOf(id))) };
}

function found(id: string): Message {
  const message = openTree().get(id);
  if (!message) throw new Error(t("This message is no longer there."));
  return message;
}

function question({ chat, tree }: Place, parent: string | null, content: string, attachments: Attachment[]): Message {
  return {
    id: newId(),
    chat: chat.id,
    parent,
    role: "user",
    content,
    reasoning: "",
    toolCalls: [],
    attachments,
    model: "",
    createdAt: timeFor(tree, parent),
    state: "done",
  };
}

async function ask(place: Place, asked: Message): Promise<void> {
  await answer(place, asked.id, [isForParts(place, asked) ? await withParts(place, asked) : asked]);
}

/** Add messages to a chat, and have the last of them answered. */
async function answer({ chat, tree }: Place, parent: string | null, added: Message[], model = modelOf(chat)): Promise<void> {
  const now = Date.now();
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
    createdAt: timeFor(tree, parent),
    state: "writing",
    stream: streamFor(chat.id, now),
  };
  const isFirst = chat.title === "";
  const titled = isFirst ? { title: titleFrom(added[0]), untitled: true } : {};
  // The chat keeps its model, whichever are loaded later.
  const chosen = chat.model === "" && isFirst ? { model } : {};
  const how = { ...titled, ...chosen, leaf: unwritten.id, updatedAt: now };
  const path = [...pathTo(tree, added[0] ? added[0].parent : parent), ...added];
  // Pieces of the answer get to the database after this, and so find the message there.
  const isKept = change(chat.id, how, [...added, unwritten]);
  void write(unwritten, bodyOf(chat, path, false, model));
  await isKept;
}

function bodyOf(chat: Chat, path: Message[], continues: boolean, model = modelOf(chat)): Body {
  const { system, sampling } = settings.peek();
  const sent = sentOf(chat, path);
  const asked = {
    system: systemWith(chat.system || system, sent.summary),
    sampling: { ...sampling, ...chat.sampling },
    model,
    tools: continues ? {} : toolsFor(chat), // the server runs none for an answer that has begun
    path: sent.path,
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
