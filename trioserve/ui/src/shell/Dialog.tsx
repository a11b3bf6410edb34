import type { ComponentChildren, VNode } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

import { Icon } from "../icon";
import { t } from "../words";
import { Toasts } from "./toasts";

interface DialogProps {
  title: string;
  class?: string;
  /** Called when it has closed, whatever closed it. */
  onClose: () => void;
  children: ComponentChildren;
}

/** A dialog over the page: Escape, its button and a press beside it close it, and focus goes back. */
export function Dialog(props: DialogProps): VNode {
  const dialog = useRef<HTMLDialogElement>(null);
  const pressedBeside = useRef(false);
  const title = useId();
  useEffect(() => dialog.current?.showModal(), []);
  const close = () => dialog.current?.close();
  return (
    <dialog
      ref={dialog}
      class={`dialog ${props.class ?? ""}`}
      aria-labelledby={title}
      onClose={props.onClose}
      onPointerDown={(event) => (pressedBeside.current = event.target === dialog.current)}
      onClick={(event) => event.target === dialog.current && pressedBeside.current && close()}
    >
      <div class="dialog-frame">
        <header class="dialog-head">
          <h2 id={title}>{props.title}</h2>
          <button type="button" class="icon-button" aria-label={t("Close")} onClick={close}>
            <Icon name="close" />
          </button>
        </header>
        {props.children}
      </div>
      <Toasts />
    </dialog>
  );
}
