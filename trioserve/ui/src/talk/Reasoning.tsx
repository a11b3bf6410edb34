// The model's reasoning before its answer, folded away.

import type { VNode } from "preact";

import { count } from "../shell/format";
import { settings } from "../state/settings";
import { several, t } from "../words";
import { Fold } from "./Fold";
import { Markdown } from "./Markdown";
import { memo } from "./memo";

function Thoughts({ text, writing }: { text: string; writing: boolean }): VNode {
  const title = writing ? (
    <span class="shimmer">{t("Thinking")}</span>
  ) : (
    <>
      {t("Thoughts")}{" "}<span class="soft">· {words(text)}</span>
    </>
  );
  return (
    <Fold class="reasoning" icon="brain" title={title} open={settings.value.showReasoning}>
      <Markdown text={text} writing={writing} />
    </Fold>
  );
}

/** The model's reasoning; `writing`: it still thinks. */
export const Reasoning = memo(Thoughts);

function words(text: string): string {
  const number = text.match(/\S+/g)?.length ?? 0;
  return several(number, "{number} word", "{number} words", { number: count(number) });
}
