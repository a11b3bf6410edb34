// The system prompt at the beginning of a conversation.

import type { VNode } from "preact";
import { t } from "../words";

import { Fold } from "./Fold";

/** The system message, folded. */
export function System({ text }: { text: string }): VNode {
  return (
    <Fold class="card" icon="settings" title={t("System prompt")}>
      <div class="card-body said" dir="auto">
        {text}
      </div>
    </Fold>
  );
}
