// What is wrong with an answer, in words.

import type { Message } from "../types";

export interface ProblemText {
  text: string;
  /** Wanted by no reader. */
  failed: boolean;
}

/** What to say of an answer; null: it is complete. */
export function problem(message: Message): ProblemText | null {
  const { state, error, finish, content, reasoning, toolCalls, steps } = message;
  if (state === "failed") return { text: error || "The answer could not be completed.", failed: true };
  if (state === "stopped") return { text: "Stopped.", failed: false };
  if (state !== "done") return null;
  if (finish === "max_steps") return { text: "The model has taken as many steps as it may.", failed: false };
  if (finish === "length") return { text: "The answer reached its greatest length.", failed: false };
  if (!content && toolCalls.length === 0) {
    const after = steps ? " after its calls of tools" : reasoning ? " after thinking" : "";
    return { text: `The model gave no answer${after}.`, failed: true };
  }
  return null;
}

/** Whether the model can continue an answer: there is text or the result of a call, and no call without a tool. */
export function canContinue({ content, toolCalls, steps }: Message): boolean {
  return (content !== "" || steps !== undefined) && toolCalls.length === 0;
}
