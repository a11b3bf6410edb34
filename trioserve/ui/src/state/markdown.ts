// A chat as a text to read: the branch that is shown, in Markdown.

import type { Chat, Message } from "../types";
import { t } from "../words";
import { fenced, withFiles } from "./prompt";

/** Write the messages of a chat, with their files' texts and the calls of tools. */
export function asMarkdown(chat: Chat, path: readonly Message[]): string {
  const system = chat.system ? [`> ${chat.system.replaceAll("\n", "\n> ")}`] : [];
  return `${[`# ${chat.title || t("Untitled")}`, ...system, ...path.map(messageIn)].join("\n\n")}\n`;
}

function messageIn(message: Message): string {
  const { role, content, attachments, steps = [], toolCalls, model } = message;
  if (role === "tool") return fenced(content);
  const said = steps.flatMap(({ content: before, calls }) => [
    before,
    ...calls.flatMap((call) => [`**${call.title}**`, fenced(call.arguments), ...(call.result ? [fenced(call.result)] : [])]),
  ]);
  const names = attachments.filter(({ data }) => data).map(({ name }) => `*${name}*`);
  const text = role === "user" ? withFiles(content, attachments.filter(({ data }) => !data)) : content;
  const calls = toolCalls.flatMap((call) => [`**${call.name}**`, fenced(call.arguments)]);
  const by = role === "assistant" && model ? `${t("Answer")} (${model})` : t(role === "user" ? "You" : "Answer");
  return [`## ${by}`, ...said, ...names, text, ...calls].filter(Boolean).join("\n\n");
}
