// What the model thought before it answered, folded away.

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { count } from "../shell/format";
import { settings } from "../state/settings";
import { Markdown } from "./Markdown";

/** The model's reasoning; only what is unfolded is drawn. */
export function Reasoning({ text, writing }: { text: string; writing: boolean }): VNode {
  const [chosen, choose] = useState<boolean | null>(null);
  const open = chosen ?? settings.value.showReasoning;
  return (
    <section class="reasoning">
      <button type="button" class="fold" aria-expanded={open} onClick={() => choose(!open)}>
        <Icon name="brain" />
        <span class={writing ? "shimmer" : undefined}>{writing ? "Thinking" : "Thoughts"}</span>
        {!writing && <span class="soft">{words(text)}</span>}
        <Icon name="chevron-down" />
      </button>
      {open && <Markdown text={text} writing={writing} />}
    </section>
  );
}

function words(text: string): string {
  const number = text.match(/\S+/g)?.length ?? 0;
  return `${count(number)} ${number === 1 ? "word" : "words"}`;
}
