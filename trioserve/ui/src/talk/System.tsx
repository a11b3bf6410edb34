// The system prompt at the beginning of a conversation.

import type { VNode } from "preact";

import { Fold } from "./Fold";

/** What the model is told before the first message, folded away. */
export function System({ text }: { text: string }): VNode {
  return (
    <Fold class="card" icon="settings" title="System prompt">
      <div class="card-body said" dir="auto">
        {text}
      </div>
    </Fold>
  );
}
