// A change of a file: its lines, with those that are added and removed.

import type { VNode } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

import { count } from "../shell/format";
import { several, t } from "../words";
import { CopyButton } from "./CopyButton";
import { memo } from "./memo";
import { ENDS, folded, readDiff, type DiffLine } from "./toolText";

/** Lines that are unfolded at once: the page stays alive while it unfolds a long change. */
const PIECE = 1_000;

const ELEMENTS = { added: "ins", removed: "del", same: "span", place: "span", left: "span" } as const;
const SIGNS = { added: "+", removed: "−", same: " ", place: "", left: "" };

interface Props {
  diff: string;
  /** True if all of it is wanted. */
  whole: boolean;
  setWhole: (whole: boolean) => void;
}

function Change({ diff, whole, setWhole }: Props): VNode {
  const read = useMemo(() => readDiff(diff), [diff]);
  const { lines, added, removed } = read;
  const [unfolded, setUnfolded] = useState(0);
  const hidden = Math.max(0, folded(read) - unfolded);
  useEffect(() => {
    if (!whole || hidden === 0) return undefined;
    const timer = setTimeout(() => setUnfolded(unfolded + PIECE));
    return () => clearTimeout(timer);
  }, [whole, hidden, unfolded]);
  const first = Math.min(lines.length, ENDS.lines + unfolded);
  const last = first + hidden;
  const row = (line: DiffLine, at: number) => <Row key={at} line={line} whole={whole} setWhole={setWhole} />;
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
          {lines.slice(0, first).map(row)}
          {hidden > 0 && <Folded lines={lines.slice(first, last)} setWhole={setWhole} />}
          {lines.slice(last).map((line, at) => row(line, last + at))}
        </code>
      </pre>
    </figure>
  );
}

/** A unified diff. The middle of a long one is folded. */
export const Diff = memo(Change);

function Folded({ lines, setWhole }: { lines: DiffLine[]; setWhole: Props["setWhole"] }): VNode {
  const characters = count(lines.reduce((sum, { text }) => sum + text.length, 0));
  const number = count(lines.length);
  return (
    <button type="button" class="button folded" onClick={() => setWhole(true)}>
      {several(lines.length, "Show {number} hidden line ({characters} characters)", "Show {number} hidden lines ({characters} characters)", { number, characters })}
    </button>
  );
}

interface RowProps extends Omit<Props, "diff"> {
  line: DiffLine;
}

const Row = memo(({ line: { kind, text, number }, whole, setWhole }: RowProps) => {
  const Element = ELEMENTS[kind];
  const hidden = whole ? 0 : text.length - 2 * ENDS.characters;
  return (
    <Element class={`diff-line ${kind}`} data-number={number}>
      <span class="sign">{SIGNS[kind]}</span>
      {hidden > 0 ? text.slice(0, ENDS.characters) : text}
      {hidden > 0 && (
        <button type="button" class="button folded" onClick={() => setWhole(true)}>
          {t("Show {number} hidden characters", { number: count(hidden) })}
        </button>
      )}
      {hidden > 0 && text.slice(-ENDS.characters)}
      {"\n"}
    </Element>
  );
});

/** The numbers of added and removed lines. */
export function DiffSize({ added, removed }: { added: number; removed: number }): VNode {
  return (
    <>
      {added > 0 && <span class="added">+{count(added)}</span>} {removed > 0 && <span class="removed">−{count(removed)}</span>}
    </>
  );
}
