// Maths, set by KaTeX, which is loaded when the first formula is there.

import { signal } from "@preact/signals";
import type { VNode } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

import { memo } from "./memo";

type Katex = typeof import("katex").default;

const katex = signal<Katex | null>(null);
let loading = false;

/** The limits of a formula: no links, no classes, no names, nothing wider than the page, no endless macros. */
export const limits = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 } as const;

async function load(): Promise<void> {
  if (loading) return;
  loading = true;
  try {
    katex.value = (await import("katex")).default;
  } catch (error) {
    console.warn("Maths are shown as they are written:", error);
    loading = false;
  }
}

function Formula({ text, display }: { text: string; display: boolean }): VNode {
  const place = useRef<HTMLSpanElement>(null);
  const library = katex.value;
  useLayoutEffect(() => {
    if (!library) void load();
    else if (place.current) set(library, text, display, place.current);
  }, [library, text, display]);
  if (!library) return <span class={display ? "maths display source" : "maths source"}>{text}</span>;
  if (!display) return <span key="inline" ref={place} class="maths" />;
  // A wide formula is scrolled, by keyboard as well.
  return <span key="display" ref={place} class="maths display" role="group" aria-label="Formula" tabIndex={0} />;
}

/** Put a formula into an element; one that is wrong is shown as it is written. */
export function set(library: Katex, text: string, display: boolean, place: HTMLElement): void {
  try {
    library.render(text, place, { ...limits, displayMode: display });
    place.classList.remove("source");
  } catch {
    place.textContent = text;
    place.classList.add("source");
  }
}

/** A formula; on separate lines if it is for display. */
export const Maths = memo(Formula);
