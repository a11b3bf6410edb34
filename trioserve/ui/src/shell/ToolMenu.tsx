import type { VNode } from "preact";

import { Icon } from "../icon";
import { choice, tools } from "../state/tools";
import { t } from "../words";
import { later } from "./later";
import { Popover } from "./Popover";

const ToolPanel = later(async () => (await import("./ToolPanel")).ToolPanel);

/** The tools that the model may call in the open chat. Shown only if the server has tools. */
export function ToolMenu(): VNode | null {
  const all = tools.value ?? [];
  if (all.length === 0) return null;
  const on = all.filter(({ name }) => choice.value.on.includes(name)).length;
  const button = (
    <>
      <Icon name="tool" />
      {on > 0 && <span aria-hidden="true">{on}</span>}
    </>
  );
  return (
    <Popover
      button={button}
      label={on > 0 ? t("Tools: {on} of {all} on", { on, all: all.length }) : t("Tools")}
      panelLabel={t("Tools")}
      buttonClass={on > 0 ? "icon-button tools-button on" : "icon-button tools-button"}
      class="tools"
    >
      {() => <ToolPanel all={all} />}
    </Popover>
  );
}
