// The line under an answer: how quickly it was written, and what it took.

import type { VNode } from "preact";

import { modelName } from "../shell/format";
import { models } from "../state/server";
import type { Stats } from "../types";
import { t } from "../words";
import { figures } from "./figures";

/** An answer in figures, and its model if there are several. */
export function StatsLine({ stats, model }: { stats: Stats; model: string }): VNode {
  const isOneOfMany = model !== "" && models.value.length > 1;
  return (
    <ul class="stats" aria-label={t("Figures of the answer")}>
      {isOneOfMany && <li title={model}>{modelName(model)}</li>}
      {figures(stats).map(({ text, title }) => (
        <li key={title} title={title}>
          {text}
        </li>
      ))}
    </ul>
  );
}
