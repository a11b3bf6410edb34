// A footnote, and the mark in the text that leads to it.

import type { ComponentChildren, VNode } from "preact";

import { t } from "../words";

/** A footnote, and the way back. */
export function Footnote({ label, children }: { label: string; children: ComponentChildren }): VNode {
  return (
    <p class="footnote" data-footnote={label} tabIndex={-1}>
      <Mark label={label} name={t("Back from footnote {label}", { label })} to="mark" /> {children}
    </p>
  );
}

/** The mark of a footnote. */
export function FootnoteMark({ label }: { label: string }): VNode {
  return <Mark label={label} name={t("Footnote {label}", { label })} to="footnote" />;
}

interface MarkProps {
  label: string;
  name: string;
  to: "footnote" | "mark";
}

function Mark({ label, name, to }: MarkProps): VNode {
  const go = (button: HTMLElement) => {
    const all = [...(button.closest(".prose")?.querySelectorAll<HTMLElement>(`[data-${to}]`) ?? [])];
    const found = all.find(({ dataset }) => dataset[to] === label);
    found?.scrollIntoView({ block: "nearest" });
    found?.focus({ preventScroll: true });
  };
  const mark = to === "footnote" ? label : undefined;
  return (
    <sup>
      <button type="button" class="footnote-mark" data-mark={mark} aria-label={name} onClick={(event) => go(event.currentTarget)}>
        {label}
      </button>
    </sup>
  );
}
