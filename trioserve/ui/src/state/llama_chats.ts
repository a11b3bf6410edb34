// Chats that llama-server's page has exported: a list of conversations as JSON, or JSON lines.

import { isRecord } from "./json";
import { blobIn } from "./media";

type Fields = Record<string, unknown>;

/**
 * The same in our words; null: this is no such file. What is wrong in it shows when it is read on.
 */
export function fromLlamaServer(file: unknown): Fields[] | null {
  const all = Array.isArray(file) ? file : [file];
  const isLines = all.some((one) => isRecord(one) && one.type === "session");
  const chats = isLines ? fromLines(all) : all;
  const fits = (one: unknown): one is { conv: Fields; messages: unknown[] } =>
    isRecord(one) && isRecord(one.conv) && Array.isArray(one.messages);
  return chats.length > 0 && chats.every(fits) ? chats.map(chatOf) : null;
}

/** A line for each conversation, followed by a line for each of its messages. */
function fromLines(lines: unknown[]): unknown[] {
  const chats: { conv: Fields; messages: unknown[] }[] = [];
  for (const line of lines.filter(isRecord)) {
    if (line.type === "session") chats.push({ conv: line, messages: [] });
    else if (line.type === "message") chats[chats.length - 1]?.messages.push(line.message);
  }
  return chats;
}

function chatOf({ conv, messages }: { conv: Fields; messages: unknown[] }): Fields {
  const all = messages.filter(isRecord);
  // Their tree begins with a message that has no text, and perhaps with the system prompt.
  const isHead = (one: Fields) => one.type === "root" || one.role === "system";
  const heads = new Map(all.filter(isHead).map((one) => [one.id, one]));
  const parentOf = (one: Fields): unknown => {
    const { parent = null } = one;
    const head = heads.get(parent);
    return head && head !== one ? parentOf(head) : parent;
  };
  const rest = all.filter((one) => !heads.has(one.id));
  const last = rest[rest.length - 1]?.id ?? null;
  const prompt = [...heads.values()].find((one) => typeof one.content === "string" && one.content);
  return {
    id: conv.id,
    title: conv.name,
    createdAt: rest[0]?.timestamp ?? conv.lastModified,
    updatedAt: conv.lastModified,
    leaf: rest.some((one) => one.id === conv.currNode) ? conv.currNode : last,
    system: prompt?.content ?? "",
    messages: rest.map((one) => ({ ...messageOf(one), parent: parentOf(one) })),
  };
}

function messageOf(given: Fields): Fields {
  const { id, role, content, timestamp, model, toolCalls, extra } = given;
  const files = Array.isArray(extra) ? extra.filter(isRecord) : [];
  return {
    id,
    role,
    content,
    createdAt: timestamp,
    state: "done",
    model: model ?? "",
    reasoning: given.reasoningContent ?? given.thinking ?? "",
    toolCalls: callsIn(toolCalls),
    attachments: files.flatMap(fileOf),
  };
}

/** A file in our words; none if it is of a kind that the page does not have. */
function fileOf({ name, size, content, base64Url, base64Data, mimeType }: Fields): Fields[] {
  if (typeof content === "string") return [{ name, size, text: content }];
  const data = base64Url ?? `data:${String(mimeType)};base64,${String(base64Data)}`;
  return typeof data === "string" && blobIn(data) ? [{ name, data }] : [];
}

/** OpenAI's form of tool calls, as a list or as its JSON. */
function callsIn(value: unknown): Fields[] {
  let calls = value;
  try {
    if (typeof calls === "string") calls = JSON.parse(calls || "[]");
  } catch {
    calls = [];
  }
  const wanted = (Array.isArray(calls) ? calls : []).filter(isRecord);
  return wanted.map((call) => {
    const called = isRecord(call.function) ? call.function : {};
    return { id: call.id ?? "", name: called.name ?? "", arguments: called.arguments ?? "" };
  });
}
