// A line that unfolds.

import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon, type IconName } from "../icon";

interface Props {
  icon: IconName;
  /** The text of the line. */
  title: ComponentChildren;
  /** Unfolded until the user folds it. */
  open?: boolean;
  class: string;
  /** For styles: what the thing is at. */
  state?: string;
  children: ComponentChildren;
}

/** A line with something below it, which is drawn only while it is unfolded. */
export function Fold({ icon, title, open: atFirst = false, class: name, state, children }: Props): VNode {
  const [chosen, choose] = useState<boolean | null>(null);
  const open = chosen ?? atFirst;
  return (
    <section class={name} data-state={state}>
      <button type="button" class="fold" aria-expanded={open} onClick={() => choose(!open)}>
        <Icon name={icon} />
        <span>{title}</span>
        <Icon name="chevron-down" />
      </button>
      {open && children}
    </section>
  );
}
