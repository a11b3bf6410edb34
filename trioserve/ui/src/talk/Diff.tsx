// A change of a file: its lines, with those that are added and removed.

import type { VNode } from "preact";
import { useMemo, useState } from "preact/hooks";

import { count } from "../shell/format";
import { several, t } from "../words";
import { CopyButton } from "./CopyButton";
import { memo } from "./memo";
import { readDiff, type DiffLine } from "./toolText";

/** Lines at first, and how many there are at most. */
export const FEW = 200;
const MOST = 2_000;

const ELEMENTS = { added: "ins", removed: "del", same: "span", place: "span" } as const;
const SIGNS = { added: "+", removed: "−", same: " ", place: "" };

function Change({ diff }: { diff: string }): VNode {
  const { lines, added, removed } = useMemo(() => readDiff(diff), [diff]);
  const [most, setMost] = useState(FEW);
  const left = lines.length - most;
  return (
    <figure class="code diff" aria-label={t("Changes: {added} added and {removed} removed lines", { added: count(added), removed: count(removed) })}>
      <figcaption>
        <span class="language">
          <DiffSize added={added} removed={removed} />
        </span>
        <CopyButton text={diff} label={t("Copy the changes")} />
      </figcaption>
      <pre tabIndex={0} dir="ltr">
        <code>
          {lines.slice(0, most).map((line, at) => (
            <Row key={at} line={line} />
          ))}
        </code>
      </pre>
      {left > 0 && (
        <p class="more">
          {several(left, "{number} more line", "{number} more lines", { number: count(left) })}
          {most < MOST && (
            <button type="button" class="button" onClick={() => setMost(MOST)}>
              {t("Show more")}
            </button>
          )}
        </p>
      )}
    </figure>
  );
}

/** A unified diff. */
export const Diff = memo(Change);

function Row({ line }: { line: DiffLine }): VNode {
  const { kind, text, number } = line;
  const Element = ELEMENTS[kind];
  return (
    <Element class={`diff-line ${kind}`} data-number={number}>
      <span class="sign">{SIGNS[kind]}</span>
      {text}
      {"\n"}
    </Element>
  );
}

/** How many lines are added and removed. */
export function DiffSize({ added, removed }: { added: number; removed: number }): VNode {
  return (
    <>
      {added > 0 && <span class="added">+{count(added)}</span>} {removed > 0 && <span class="removed">−{count(removed)}</span>}
    </>
  );
}
