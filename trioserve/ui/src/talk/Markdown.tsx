// A text in Markdown, drawn again block by block while it grows.

import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { Blocks } from "./blocks";
import { Block } from "./Block";

/** Of the time that passes while a text is written, drawing it takes at most a quarter. */
const SHARE = 3;
/** A text that takes less than this to draw is drawn at each frame, milliseconds. */
const QUICK_MS = 4;

/** A text in Markdown. While it is written, only its last block is read and drawn again. */
export function Markdown({ text, writing }: { text: string; writing: boolean }): VNode {
  const shown = usePaced(text, writing);
  const reader = useRef<Blocks | null>(null);
  reader.current ??= new Blocks();
  const blocks = reader.current.update(shown, writing);
  return (
    <div class={writing ? "prose writing" : "prose"} dir="auto">
      {blocks.map(({ key, token }, index) => (
        <Block key={key} token={token} open={writing && index === blocks.length - 1} />
      ))}
    </div>
  );
}

/** The text to show now: where drawing takes long, it waits a little for more. */
function usePaced(text: string, writing: boolean): string {
  const [, drawAgain] = useState(0);
  const pace = useRef({ shown: text, drawn: "", readyAt: 0 }).current;
  const begun = performance.now();
  if (!writing || begun >= pace.readyAt) pace.shown = text;

  useLayoutEffect(() => {
    if (pace.drawn === pace.shown) return;
    pace.drawn = pace.shown;
    const cost = performance.now() - begun;
    pace.readyAt = cost > QUICK_MS ? begun + cost * (1 + SHARE) : 0;
  });
  useEffect(() => {
    if (pace.shown === text) return undefined;
    const timer = setTimeout(() => drawAgain((count) => count + 1), pace.readyAt - performance.now());
    return () => clearTimeout(timer);
  });
  return pace.shown;
}
