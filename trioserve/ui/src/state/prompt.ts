// What the server is sent of a chat.

import type { Attachment, Message, Sampling } from "../types";
import { PING_S } from "../server/follow";

export interface Asked {
  system: string;
  sampling: Sampling;
  model: string;
  path: readonly Message[];
  /** The last message of the path is an answer that the model is to go on with. */
  continues: boolean;
}

/** The body of the request. */
export function bodyFor({ system, sampling, model, path, continues }: Asked): Record<string, unknown> {
  const said = messagesFor(path, continues);
  const head = system.trim() ? [{ role: "system", content: system }] : [];
  return {
    ...sampling,
    messages: [...head, ...said],
    ...(model ? { model } : {}),
    ...(continues ? { continue_final_message: true, add_generation_prompt: false } : {}),
    stream: true,
    return_progress: true,
    timings_per_token: true,
    queue_comments: true,
    sse_ping_interval: PING_S,
  };
}

interface Said {
  role: string;
  content: string;
  reasoning_content?: string;
  tool_calls?: unknown[];
  tool_call_id?: string;
}

/**
 * Many templates refuse two messages of the same role in a row: answers that have no text are left
 * out, and questions that then follow each other become one.
 */
function messagesFor(path: readonly Message[], continues: boolean): Said[] {
  const said: Said[] = [];
  path.forEach((message, index) => {
    const isLast = index === path.length - 1;
    if (isEmpty(message) && !(isLast && continues)) return;
    const next = saidBy(message, path, index);
    const last = said[said.length - 1];
    if (last?.role === "user" && next.role === "user") last.content += `\n\n${next.content}`;
    else said.push(next);
  });
  return said;
}

function isEmpty(message: Message): boolean {
  const { role, content, reasoning, toolCalls } = message;
  return role === "assistant" && !content && !reasoning && toolCalls.length === 0;
}

function saidBy(message: Message, path: readonly Message[], index: number): Said {
  const { role, attachments, content, reasoning } = message;
  if (role === "tool") return { role, content, tool_call_id: callAnsweredBy(path, index) };
  if (role !== "assistant") return { role, content: withFiles(content, attachments) };
  const said: Said = { role, content };
  if (reasoning) said.reasoning_content = reasoning;
  // Calls that nobody has answered would make templates wait for results.
  if (path[index + 1]?.role === "tool") {
    said.tool_calls = message.toolCalls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return said;
}

/** The id of the call that a result belongs to: results come in the order of the calls. */
function callAnsweredBy(path: readonly Message[], index: number): string {
  let before = index;
  while (path[before]?.role === "tool") before--;
  return path[before]?.toolCalls[index - before - 1]?.id ?? "";
}

/** Files come before the question, each in a fence that its text cannot close. */
export function withFiles(text: string, files: readonly Attachment[]): string {
  const written = files.map((file) => {
    const runs = file.text.match(/`{3,}/g) ?? [];
    const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
    const end = file.text.endsWith("\n") ? "" : "\n";
    return `File: ${file.name}\n${fence}\n${file.text}${end}${fence}`;
  });
  return [...written, text].filter(Boolean).join("\n\n");
}
