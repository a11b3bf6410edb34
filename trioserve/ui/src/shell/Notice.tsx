import type { ComponentChildren, VNode } from "preact";

import { Icon, type IconName } from "../icon";

interface NoticeProps {
  icon: IconName;
  quiet?: boolean;
  children: ComponentChildren;
}

/** Something to know, above the composer. */
export function Notice({ icon, quiet = false, children }: NoticeProps): VNode {
  return (
    <div class={quiet ? "notice quiet" : "notice"}>
      <Icon name={icon} />
      <div class="notice-body">{children}</div>
    </div>
  );
}
