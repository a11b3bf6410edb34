// The line under an answer: how quickly it was written, and what it took.

import type { VNode } from "preact";

import type { Stats } from "../types";
import { figures } from "./figures";

/** What is to be said of an answer in figures. */
export function StatsLine({ stats }: { stats: Stats }): VNode {
  return (
    <ul class="stats" aria-label="Figures of the answer">
      {figures(stats).map(({ text, title }) => (
        <li key={title} title={title}>
          {text}
        </li>
      ))}
    </ul>
  );
}
