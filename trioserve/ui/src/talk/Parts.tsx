// The parts of long documents that were sent with a question.

import type { VNode } from "preact";

import { documentOf } from "../state/talk";
import type { Part } from "../types";
import { several, t } from "../words";
import { Fold } from "./Fold";

/** The parts, folded away: where each is, and its text. */
export function Parts({ parts }: { parts: readonly Part[] }): VNode {
  const title = several(parts.length, "{number} part of the documents was found", "{number} parts of the documents were found", { number: parts.length });
  return (
    <Fold class="card" icon="search" title={title}>
      <ul class="parts card-body">
        {parts.map(({ file, from, to }) => {
          const { name, text } = documentOf(file) ?? { name: t("A file that is gone"), text: "" };
          return (
            <li key={`${file} ${from}`}>
              <p class="hint">{t("{name}, from {share} of its length", { name, share: `${Math.round((from / Math.max(1, text.length)) * 100)}%` })}</p>
              <blockquote class="said" dir="auto">
                {text.slice(from, to)}
              </blockquote>
            </li>
          );
        })}
      </ul>
    </Fold>
  );
}
