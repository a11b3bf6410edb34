import type { VNode } from "preact";

import { openChat, setChat } from "../state/chats";
import { server } from "../state/server";
import { presets } from "../state/settings";
import { t } from "../words";
import { describe, modelName } from "./format";
import { currentModel } from "./ModelMenu";
import { attempt } from "./toasts";
import { Toy } from "./Toy";

/** The greeting of an empty chat: the model that will answer. */
export function Welcome(): VNode {
  const model = currentModel();
  const isConnecting = server.value.state === "connecting";
  return (
    <div class="welcome">
      <h1>{model ? modelName(model.id) : isConnecting ? "" : "trioserve"}</h1>
      <p class="welcome-facts">{model && describe(model)}</p>
      {model?.advice && <p class="hint welcome-advice">{model.advice}</p>}
      {model?.toy && <Toy model={model} />}
      <PresetChips />
    </div>
  );
}

/** The presets, to begin a chat with. */
function PresetChips(): VNode | null {
  const open = openChat.value;
  if (!open || presets.value.length === 0) return null;
  const { id, system, sampling } = open.chat;
  const now = JSON.stringify([system, sampling]);
  return (
    <div class="preset-chips" role="group" aria-label={t("Presets")}>
      {presets.value.map((preset) => {
        const used = JSON.stringify([preset.system, preset.sampling]) === now;
        const change = used ? { system: "", sampling: {} } : { system: preset.system, sampling: preset.sampling };
        return (
          <button
            key={preset.id}
            type="button"
            class="button"
            aria-pressed={used}
            onClick={() => void attempt(() => setChat(id, change))}
          >
            {preset.name}
          </button>
        );
      })}
    </div>
  );
}
