// A text in Markdown, drawn again block by block while it grows.

import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { Blocks } from "./blocks";
import { Block } from "./Block";

/** Of the time that passes while a text is written, drawing it takes at most a quarter. */
const SHARE = 3;
/** Between two drawings, milliseconds: a reader sees no more of them, and a phone's battery does. */
const PAUSE_MS = 30;

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

/** The text to show now: after each drawing it waits a little for more, and longer where drawing takes long. */
function usePaced(text: string, writing: boolean): string {
  const [, drawAgain] = useState(0);
  const pace = useRef({ shown: text, drawn: "", readyAt: 0 }).current;
  const begun = performance.now();
  if (!writing || begun >= pace.readyAt) pace.shown = text;

  useLayoutEffect(() => {
    if (pace.drawn === pace.shown) return;
    pace.drawn = pace.shown;
    const cost = performance.now() - begun;
    pace.readyAt = begun + Math.max(PAUSE_MS, cost * (1 + SHARE));
  });
  useEffect(() => {
    if (pace.shown === text) return undefined;
    const timer = setTimeout(() => drawAgain((count) => count + 1), pace.readyAt - performance.now());
    return () => clearTimeout(timer);
  });
  return pace.shown;
}
