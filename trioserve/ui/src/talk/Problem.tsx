// The notice of an answer that is not complete, with its buttons.

import type { VNode } from "preact";

import { Icon } from "../icon";
import { attempt } from "../shell/toasts";
import { continueAnswer, regenerate } from "../state/talk";
import type { Message } from "../types";
import { t } from "../words";
import { canContinue, problem } from "./problems";

/** A note under an answer that failed, was stopped, or was cut off. */
export function Problem({ message, last }: { message: Message; last: boolean }): VNode | null {
  const found = problem(message);
  if (!found) return null;
  return (
    <div class={found.failed ? "problem failed" : "problem"} role={found.failed && last ? "alert" : undefined}>
      {found.failed && <Icon name="alert" />}
      <p>{found.text}</p>
      {last && (
        <span class="buttons">
          {canContinue(message) && (
            <button type="button" class="button" onClick={() => void attempt(() => continueAnswer(message.id))}>
              {t("Continue")}
            </button>
          )}
          {found.failed && (
            <button type="button" class="button" onClick={() => void attempt(() => regenerate(message.id))}>
              {t("Try again")}
            </button>
          )}
        </span>
      )}
    </div>
  );
}
