// The lines of code that is coloured as far as its beginning.

import type { Line } from "./highlightCode";
import type { Coloured } from "./painter";

/** The lines of `code`, which begins with the text that is coloured. The rest of it is plain. */
export function linesOf(code: string, coloured: Coloured): Line[] {
  const [first = [], ...more] = code.slice(coloured.code.length).split("\n").map(plain);
  const last = coloured.lines.at(-1) ?? [];
  return [...coloured.lines.slice(0, -1), [...last, ...first], ...more];
}

function plain(text: string): Line {
  return text ? [["", text]] : [];
}

/** True if two lines look the same. */
export function same(one: Line, other: Line | undefined): boolean {
  if (one === other) return true;
  return (
    one.length === other?.length &&
    one.every(([kind, text], at) => other[at]?.[0] === kind && other[at][1] === text)
  );
}
