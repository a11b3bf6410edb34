// The system prompt at the beginning of a conversation.

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";

/** What the model is told before the first message, folded away. */
export function System({ text }: { text: string }): VNode {
  const [open, setOpen] = useState(false);
  return (
    <section class="folded-card system">
      <button type="button" class="fold" aria-expanded={open} onClick={() => setOpen(!open)}>
        <Icon name="settings" />
        <span>System prompt</span>
        <Icon name="chevron-down" />
      </button>
      {open && (
        <div class="folded-body said" dir="auto">
          {text}
        </div>
      )}
    </section>
  );
}
