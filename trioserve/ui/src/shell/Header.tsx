import type { VNode } from "preact";

import { Icon, type IconName } from "../icon";
import { openChat } from "../state/chats";
import { t } from "../words";
import { keyNames } from "./keys";
import { ModelMenu } from "./ModelMenu";
import { mac, startChat } from "./shortcuts";
import { activityShown, overlay, showSidebar, sidebarShown } from "./view";

/** The bar above the conversation: the model, and the buttons of panels and menus. */
export function Header(): VNode {
  const open = openChat.value;
  const isOwn = open && (open.chat.system !== "" || Object.keys(open.chat.sampling).length > 0);
  return (
    <header class="head">
      {!sidebarShown.value && (
        <>
          <Tool icon="sidebar" label={t("Show the chats")} keys="b" onClick={() => showSidebar(true)} />
          <Tool icon="plus" label={t("New chat")} onClick={startChat} />
        </>
      )}
      <ModelMenu />
      <span class="space" />
      <Tool
        icon="settings"
        label={isOwn ? t("Settings of this chat (changed)") : t("Settings of this chat")}
        marked={!!isOwn}
        onClick={() => (overlay.value = { settings: "chat" })}
      />
      <Tool
        icon="activity"
        label={t("Activity of the server")}
        keys="j"
        pressed={activityShown.value}
        onClick={() => (activityShown.value = !activityShown.value)}
      />
    </header>
  );
}

interface ToolProps {
  icon: IconName;
  label: string;
  /** The key that does the same together with Ctrl, or ⌘. */
  keys?: string;
  pressed?: boolean;
  marked?: boolean;
  onClick: () => void;
}

function Tool({ icon, label, keys, pressed, marked, onClick }: ToolProps): VNode {
  const hint = keys ? ` (${keyNames({ key: keys, mod: true }, mac).join(mac ? "" : "+")})` : "";
  return (
    <button
      type="button"
      class={marked ? "icon-button marked" : "icon-button"}
      aria-label={label}
      title={label + hint}
      aria-pressed={pressed}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}
