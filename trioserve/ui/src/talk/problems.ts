// What is wrong with an answer, in words.

import type { Message } from "../types";

export interface ProblemText {
  text: string;
  /** Not wanted by anybody. */
  failed: boolean;
}

/** What to say of an answer; null: it is complete. */
export function problem(message: Message): ProblemText | null {
  const { state, error, finish, content, reasoning, toolCalls } = message;
  if (state === "failed") return { text: error || "The answer could not be completed.", failed: true };
  if (state === "stopped") return { text: "Stopped.", failed: false };
  if (state !== "done") return null;
  if (finish === "length") return { text: "The answer reached its greatest length.", failed: false };
  if (!content && toolCalls.length === 0) {
    return { text: reasoning ? "The model gave no answer after thinking." : "The model gave no answer.", failed: true };
  }
  return null;
}

/** Whether the model can go on with an answer: there is text, and what ended it was no call of a tool. */
export function canContinue({ content, toolCalls }: Message): boolean {
  return content !== "" && toolCalls.length === 0;
}
