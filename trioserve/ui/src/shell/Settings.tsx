import type { VNode } from "preact";

import { openChat } from "../state/chats";
import { t, type Text } from "../words";
import { AllChats, ThisChat } from "./ChatSettings";
import { Data } from "./Data";
import { Dialog } from "./Dialog";
import { General } from "./General";
import { Mcp } from "./Mcp";
import { Presets } from "./Presets";
import { type Section, overlay } from "./view";

const sections: Record<Section, { title: Text; body: () => VNode | null }> = {
  general: { title: "General", body: General },
  chat: { title: "This chat", body: ThisChat },
  all: { title: "All chats", body: AllChats },
  presets: { title: "Presets", body: Presets },
  mcp: { title: "MCP servers", body: Mcp },
  data: { title: "Your data", body: Data },
};

/** The settings, in tabs. */
export function Settings({ section }: { section: Section }): VNode {
  const names = Object.keys(sections) as Section[];
  const go = (to: Section) => (overlay.value = { settings: to });
  const step = (event: KeyboardEvent) => {
    const by = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const to = names[(names.indexOf(section) + by + names.length) % names.length];
    if (!to) return;
    go(to);
    document.getElementById(`tab-${to}`)?.focus();
  };
  const Body = sections[section].body;
  return (
    <Dialog title={t("Settings")} class="settings" onClose={() => (overlay.value = null)}>
      <div class="settings-body">
        <div class="tabs" role="tablist" aria-orientation="vertical" aria-label={t("Parts of the settings")} onKeyDown={step}>
          {names.map((name) => (
            <button
              key={name}
              id={`tab-${name}`}
              type="button"
              role="tab"
              aria-selected={name === section}
              aria-controls="settings-panel"
              tabIndex={name === section ? 0 : -1}
              autofocus={name === section}
              onClick={() => go(name)}
            >
              {t(sections[name].title)}
            </button>
          ))}
        </div>
        <div
          id="settings-panel"
          class="settings-panel"
          role="tabpanel"
          tabIndex={0}
          aria-labelledby={`tab-${section}`}
          // A chat's settings are those of the chat that is open now.
          key={section === "chat" ? openChat.value?.chat.id : section}
        >
          <Body />
        </div>
      </div>
    </Dialog>
  );
}
