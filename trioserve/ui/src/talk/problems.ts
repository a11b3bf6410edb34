// The problem of an answer, in words.

import type { Message } from "../types";
import { t } from "../words";

export interface ProblemText {
  text: string;
  /** Wanted by no reader. */
  failed: boolean;
}

/** What to say of an answer; null: it is complete. */
export function problem(message: Message): ProblemText | null {
  const { state, error, finish, content, reasoning, toolCalls, steps, stats } = message;
  if (state === "failed") return { text: error || t("The answer could not be completed."), failed: true };
  if (state === "stopped") return { text: t("Stopped."), failed: false };
  if (state !== "done") return null;
  if (finish === "max_steps") return { text: t("The model reached the maximum number of steps."), failed: false };
  const isFull = stats !== undefined && stats.contextSize > 0 && stats.contextUsed >= stats.contextSize;
  if (finish === "length" && isFull) return { text: t("The answer filled the context."), failed: false };
  if (finish === "length") return { text: t("The answer reached the maximum length."), failed: false };
  if (!content && toolCalls.length === 0) {
    if (steps) return { text: t("The model gave no answer after its tool calls."), failed: true };
    return { text: t(reasoning ? "The model gave no answer after thinking." : "The model gave no answer."), failed: true };
  }
  return null;
}

/** True if the model can continue an answer: it has text or the result of a call, and no call without a tool. */
export function canContinue({ content, toolCalls, steps }: Message): boolean {
  return (content !== "" || steps !== undefined) && toolCalls.length === 0;
}
