// The tokens of an answer, coloured by how probable they were.

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { percent } from "../shell/format";
import type { TokenOdds } from "../types";
import { t } from "../words";
import { Fold } from "./Fold";

/** The tokens, folded away. One is chosen with the mouse or the arrow keys; what else was likely is below. */
export function Odds({ odds }: { odds: readonly TokenOdds[] }): VNode {
  return (
    <Fold class="odds" icon="search" title={t("Probabilities of the tokens")}>
      <Tokens odds={odds} />
    </Fold>
  );
}

function Tokens({ odds }: { odds: readonly TokenOdds[] }): VNode {
  const [at, choose] = useState(0);
  const chosen = odds[Math.min(at, odds.length - 1)]!;
  const step = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(odds.length - 1, at + by)));
  };
  return (
    <div class="card-body">
      <p class="odds-tokens" tabIndex={0} role="group" aria-label={t("Tokens; the arrow keys choose one")} onKeyDown={step}>
        {odds.map(({ text, probability }, index) => (
          <span
            key={index}
            class={index === at ? "chosen" : undefined}
            data-odds={Math.min(4, Math.floor(probability * 5))}
            title={percent(probability)}
            onClick={() => choose(index)}
          >
            {text}
          </span>
        ))}
      </p>
      <ul class="odds-others" aria-live="polite">
        {(chosen.others.length > 0 ? chosen.others : [chosen]).map(({ text, probability }) => (
          <li key={text}>
            <code>{JSON.stringify(text)}</code> {percent(probability)}
          </li>
        ))}
      </ul>
    </div>
  );
}
