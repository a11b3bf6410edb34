import type { VNode } from "preact";

import { Icon } from "../icon";
import { openChat, setChat } from "../state/chats";
import { presets } from "../state/settings";
import type { Preset } from "../types";
import { t } from "../words";
import { quoted } from "./format";
import { summary } from "./sampling";
import { attempt, say } from "./toasts";

/** The presets: their names, and what is in them. */
export function Presets(): VNode {
  if (presets.value.length === 0) {
    return (
      <p class="lead">
        {t("A preset is a system prompt with settings of sampling, under a name. Write them down in “This chat” and choose “Save as preset”.")}
      </p>
    );
  }
  return (
    <ul class="presets">
      {presets.value.map((preset) => (
        <Row key={preset.id} preset={preset} />
      ))}
    </ul>
  );
}

function Row({ preset }: { preset: Preset }): VNode {
  const remove = () => {
    presets.value = presets.value.filter((one) => one.id !== preset.id);
    say(t("{name} was deleted.", { name: quoted(preset.name) }), {
      label: t("Undo"),
      run: () => {
        presets.value = [...presets.value, preset];
      },
    });
  };
  const rename = (name: string) => {
    presets.value = presets.value.map((one) => (one.id === preset.id ? { ...one, name } : one));
  };
  return (
    <li class="preset">
      <input
        class="field"
        aria-label={t("Name of the preset")}
        value={preset.name}
        onChange={(event) => {
          const name = event.currentTarget.value.trim();
          if (name) rename(name);
          else event.currentTarget.value = preset.name;
        }}
      />
      <UseButton preset={preset} />
      <button
        type="button"
        class="icon-button"
        aria-label={t("Delete the preset {name}", { name: preset.name })}
        title={t("Delete")}
        onClick={remove}
      >
        <Icon name="trash" />
      </button>
      {preset.system && <p class="hint quote">{preset.system}</p>}
      {Object.keys(preset.sampling).length > 0 && <p class="hint">{summary(preset.sampling)}</p>}
    </li>
  );
}

/** Puts a preset in use in the open chat. */
function UseButton({ preset }: { preset: Preset }): VNode {
  const use = async () => {
    const open = openChat.value;
    if (!open) return;
    await setChat(open.chat.id, { system: preset.system, sampling: preset.sampling });
    say(t("{name} is in use in this chat.", { name: quoted(preset.name) }));
  };
  return (
    <button type="button" class="button" disabled={!openChat.value} onClick={() => void attempt(use)}>
      {t("Use")}
    </button>
  );
}
