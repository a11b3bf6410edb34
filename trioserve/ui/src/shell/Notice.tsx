import { signal } from "@preact/signals";
import type { ComponentChildren, VNode } from "preact";

import { Icon, type IconName } from "../icon";
import { t } from "../words";
import { focusComposer } from "./view";

interface NoticeProps {
  icon: IconName;
  quiet?: boolean;
  /** The topic, if the notice can be closed; a notice with another topic appears again. */
  about?: string;
  children: ComponentChildren;
}

/** The topics of closed notices. */
const closed = signal<readonly string[]>([]);

/** Something to know, above the composer. */
export function Notice({ icon, quiet = false, about, children }: NoticeProps): VNode | null {
  if (about !== undefined && closed.value.includes(about)) return null;
  const close = () => {
    closed.value = [...closed.value, about!];
    focusComposer();
  };
  return (
    <div class={quiet ? "notice quiet" : "notice"}>
      <Icon name={icon} />
      <div class="notice-body">{children}</div>
      {about !== undefined && (
        <button type="button" class="icon-button" aria-label={t("Close the notice")} title={t("Close")} onClick={close}>
          <Icon name="close" />
        </button>
      )}
    </div>
  );
}
