import type { ComponentChildren, VNode } from "preact";
import { useId, useRef, useState } from "preact/hooks";

import { Icon, type IconName } from "../icon";

interface PopoverProps {
  /** The content of the button. */
  button: ComponentChildren;
  /** The name of the button, if its content has no text. */
  label?: string;
  /** The name of the panel, if not that of the button. */
  panelLabel?: string;
  buttonClass: string;
  class?: string;
  role?: "menu" | "dialog";
  /** Makes its content when it opens; gets a function that closes it. */
  children: (close: () => void) => ComponentChildren;
}

/** A button, and what opens below or above it, over everything else. */
export function Popover(props: PopoverProps): VNode {
  const id = useId();
  const button = useRef<HTMLButtonElement>(null);
  const panel = useRef<HTMLDivElement>(null);
  const [open, setOpen] = useState(false);

  const toggles = (event: { newState: string }) => {
    if (event.newState !== "open" || !button.current || !panel.current) return;
    place(panel.current, button.current.getBoundingClientRect());
    setOpen(true);
  };
  const toggled = (event: { newState: string }) => {
    if (event.newState === "closed") setOpen(false);
    else panel.current?.querySelector<HTMLElement>("[data-first], .menu-entry")?.focus();
  };
  return (
    <>
      <button
        ref={button}
        type="button"
        class={props.buttonClass}
        aria-label={props.label}
        title={props.label}
        aria-haspopup={props.role ?? "dialog"}
        aria-expanded={open}
        popovertarget={id}
      >
        {props.button}
      </button>
      <div
        ref={panel}
        id={id}
        popover="auto"
        class={`popover ${props.class ?? ""}`}
        role={open ? props.role ?? "dialog" : undefined}
        aria-label={open ? props.panelLabel ?? props.label : undefined}
        onBeforeToggle={toggles}
        onToggle={toggled}
        onKeyDown={(event) => panel.current && step(event, panel.current)}
      >
        {open && props.children(() => panel.current?.hidePopover())}
      </div>
    </>
  );
}

/** Put a panel at a button: on the side, and at the edge, where there is more room. */
function place(panel: HTMLElement, at: DOMRect): void {
  const below = at.bottom < innerHeight * 0.6;
  const fromLeft = at.left + at.right < innerWidth;
  const { style } = panel;
  style.top = below ? `${at.bottom + 4}px` : "auto";
  style.bottom = below ? "auto" : `${innerHeight - at.top + 4}px`;
  style.left = fromLeft ? `${Math.max(at.left, 8)}px` : "auto";
  style.right = fromLeft ? "auto" : `${Math.max(innerWidth - at.right, 8)}px`;
  style.maxHeight = `${(below ? innerHeight - at.bottom : at.top) - 16}px`;
}

/** Move between the entries with the arrow keys. */
function step(event: KeyboardEvent, panel: HTMLElement): void {
  const entries = [...panel.querySelectorAll<HTMLElement>(".menu-entry")];
  if (entries.length === 0 || (event.target instanceof HTMLInputElement && !event.key.startsWith("Arrow"))) return;
  const at = entries.indexOf(document.activeElement as HTMLElement);
  const to = new Map([
    ["ArrowDown", at + 1],
    ["ArrowUp", at < 0 ? entries.length - 1 : at - 1],
    ["Home", 0],
    ["End", entries.length - 1],
  ]).get(event.key);
  if (to === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  entries[(to + entries.length) % entries.length]?.focus();
}

/** An entry of a menu. */
export interface Entry {
  label: string;
  icon: IconName;
  danger?: boolean;
  run: () => void;
}

/** A button that opens a menu. */
export function Menu({ label, entries, icon = "more" }: { label: string; entries: Entry[]; icon?: IconName }): VNode {
  return (
    <Popover button={<Icon name={icon} />} label={label} buttonClass="icon-button more" class="menu" role="menu">
      {(close) =>
        entries.map((entry) => (
          <button
            key={entry.label}
            type="button"
            role="menuitem"
            tabIndex={-1}
            class={entry.danger ? "menu-entry danger" : "menu-entry"}
            onClick={() => {
              close();
              entry.run();
            }}
          >
            <Icon name={entry.icon} />
            {entry.label}
          </button>
        ))
      }
    </Popover>
  );
}
