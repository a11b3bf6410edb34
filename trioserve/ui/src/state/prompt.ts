// A chat as it is sent to the server.

import type { Attachment, MadeCall, Message, Sampling, Step, ToolCall } from "../types";
import { PING_S } from "../server/follow";
import { isObject } from "./json";
import { dataUrlOf, kindOf, PDF } from "./media";

export interface Asked {
  system: string;
  sampling: Sampling;
  model: string;
  path: readonly Message[];
  /** The tools that the server is to run, as a field of the request. */
  tools: Record<string, unknown>;
  /** The last message of the path is an answer for the model to continue. */
  continues: boolean;
}

/** The body of the request. */
export async function bodyFor({ system, sampling, model, tools, path, continues }: Asked): Promise<Record<string, unknown>> {
  const { json_schema: schema, top_logprobs: alternatives, ...fields } = sampling;
  const said = await messagesFor(path, continues);
  const head = system.trim() ? [{ role: "system", content: system }] : [];
  return {
    ...fields,
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(String(schema)) } } } : {}),
    ...(alternatives ? { logprobs: true, top_logprobs: alternatives } : {}),
    messages: [...head, ...said],
    ...(model ? { model } : {}),
    ...tools,
    ...(continues ? { continue_final_message: true, add_generation_prompt: false } : {}),
    stream: true,
    return_progress: true,
    timings_per_token: true,
    queue_comments: true,
    sse_ping_interval: PING_S,
  };
}

type Part = Record<string, unknown>;

interface Said {
  role: string;
  content: string | Part[];
  reasoning_content?: string;
  tool_calls?: unknown[];
  tool_call_id?: string;
  name?: string;
}

/**
 * Many templates refuse two messages of the same role in a row: answers that have no text are left
 * out, and questions that then follow each other become one.
 */
async function messagesFor(path: readonly Message[], continues: boolean): Promise<Said[]> {
  const said: Said[] = [];
  for (const [index, message] of path.entries()) {
    const isLast = index === path.length - 1;
    if (message.steps) said.push(...message.steps.flatMap(saidIn));
    if (isEmpty(message) && !(isLast && continues)) continue;
    const next = await saidBy(message, path, index);
    const last = said[said.length - 1];
    if (last?.role === "user" && next.role === "user") last.content = joined(last.content, next.content);
    else said.push(next);
  }
  return said;
}

/** Two questions as one. */
function joined(first: Said["content"], second: Said["content"]): Said["content"] {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  return [...partsOf(first), ...partsOf(second)];
}

function partsOf(content: Said["content"]): Part[] {
  if (typeof content !== "string") return content;
  return content ? [{ type: "text", text: content }] : [];
}

function isEmpty(message: Message): boolean {
  const { role, content, reasoning, toolCalls } = message;
  return role === "assistant" && !content && !reasoning && toolCalls.length === 0;
}

async function saidBy(message: Message, path: readonly Message[], index: number): Promise<Said> {
  const { role, attachments, content, reasoning } = message;
  if (role === "tool") return { role, content, tool_call_id: callAnsweredBy(path, index) };
  if (role !== "assistant") {
    const media = await Promise.all(attachments.filter((file) => file.data).map(mediaPart));
    const text = textOf(message, path);
    return { role, content: media.length > 0 ? [...media, ...partsOf(text)] : text };
  }
  const said: Said = { role, content };
  if (reasoning) said.reasoning_content = reasoning;
  // Calls without results would make templates wait for them.
  if (path[index + 1]?.role === "tool") {
    said.tool_calls = message.toolCalls.map(called);
  }
  return said;
}

/** The text of a message with its text files: whole, or only the parts found for the question. */
function textOf({ content, attachments, parts }: Message, path: readonly Message[]): string {
  const files = attachments.filter((file) => !file.data);
  if (!parts) return withFiles(content, files);
  const documents = path.flatMap((one) => one.attachments);
  const pieces = parts.map((part) => {
    const { name, text } = documents.find(({ id }) => id === part.file) ?? { name: "", text: "" };
    return { name: `${name}, characters ${part.from + 1} to ${part.to} of ${text.length}`, text: text.slice(part.from, part.to) };
  });
  return withFiles(content, pieces);
}

function called({ id, name, arguments: written }: ToolCall): unknown {
  return { id, type: "function", function: { name, arguments: written } };
}

/**
 * A step with calls that the server has made, and their results: what the server itself told the model of
 * them, so that it is found in the cache.
 */
function saidIn({ content, reasoning, calls }: Step): Said[] {
  const asked: Said = { role: "assistant", content, tool_calls: calls.map(readable).map(called) };
  if (reasoning) asked.reasoning_content = reasoning;
  const given = calls.map((call) => ({
    role: "tool", tool_call_id: call.id, name: call.name, content: resultOf(call),
  }));
  return [asked, ...given];
}

/** The call with an object for its arguments: templates read them, and refuse other values. */
function readable(call: ToolCall): ToolCall {
  return isObject(call.arguments) ? call : { ...call, arguments: "{}" };
}

/** The result that the model gets for a denied call. */
export const DENIED = "The user did not allow this call.";

function resultOf({ result, state }: MadeCall): string {
  return result ?? (state === "denied" ? DENIED : "The call was stopped before it had a result.");
}

/** A file that is no text, as OpenAI's API takes it; videos as llama-server does. */
async function mediaPart(file: Attachment): Promise<Part> {
  const url = await dataUrlOf(file);
  if (file.type === PDF) return { type: "file", file: { filename: file.name, file_data: url } };
  const data = url.slice(url.indexOf(",") + 1);
  switch (kindOf(file.type)) {
    case "audio":
      return { type: "input_audio", input_audio: { data, format: file.type.slice("audio/".length) } };
    case "video":
      return { type: "input_video", input_video: { data } };
    default:
      return { type: "image_url", image_url: { url } };
  }
}

/** The id of the call that a result belongs to: results come in the order of the calls. */
function callAnsweredBy(path: readonly Message[], index: number): string {
  let before = index;
  while (path[before]?.role === "tool") before--;
  return path[before]?.toolCalls[index - before - 1]?.id ?? "";
}

/** Text files come before the question, each in a fence that its text cannot close. */
export function withFiles(text: string, files: readonly Pick<Attachment, "name" | "text">[]): string {
  const written = files.map((file) => `File: ${file.name}\n${fenced(file.text)}`);
  return [...written, text].filter(Boolean).join("\n\n");
}

/** A text as a block of code. */
export function fenced(text: string): string {
  const runs = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
