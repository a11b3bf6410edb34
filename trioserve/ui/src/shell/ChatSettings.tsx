import type { VNode } from "preact";
import { useId, useState } from "preact/hooks";

import { openChat, setChat } from "../state/chats";
import { newId } from "../state/ids";
import { presets, settings } from "../state/settings";
import type { Sampling } from "../types";
import { t } from "../words";
import { useFocus } from "./focus";
import { quoted } from "./format";
import { SamplingForm } from "./SamplingForm";
import { attempt, say } from "./toasts";

/** The system message and the settings of the open chat. */
export function ThisChat(): VNode | null {
  const open = openChat.value;
  if (!open) return null;
  const { id, system, sampling } = open.chat;
  const { system: systemOfAll, sampling: samplingOfAll } = settings.value;
  return (
    <>
      <p class="lead">{t("These hold for the open chat. What is empty is as in “All chats”.")}</p>
      <Form
        system={system}
        sampling={sampling}
        systemByDefault={systemOfAll}
        under={samplingOfAll}
        onChange={(change) => void attempt(() => setChat(id, change))}
      />
    </>
  );
}

/** The defaults of chats without settings. */
export function AllChats(): VNode {
  const { system, sampling } = settings.value;
  return (
    <>
      <p class="lead">{t("These apply to every chat without settings. Empty fields take the defaults of the server.")}</p>
      <Form
        system={system}
        sampling={sampling}
        systemByDefault=""
        under={{}}
        onChange={(change) => (settings.value = { ...settings.value, ...change })}
      />
    </>
  );
}

interface FormProps {
  system: string;
  sampling: Sampling;
  systemByDefault: string;
  under: Sampling;
  onChange: (change: { system?: string; sampling?: Sampling }) => void;
}

function Form({ system, sampling, systemByDefault, under, onChange }: FormProps): VNode {
  const id = useId();
  const isEmpty = system === "" && Object.keys(sampling).length === 0;
  return (
    <>
      <PresetChoice onChange={onChange} />
      <div class="stacked">
        <label for={id}>{t("System prompt")}</label>
        <textarea
          id={id}
          class="field system"
          rows={5}
          placeholder={systemByDefault || t("How the model should behave, such as: Answer in one paragraph.")}
          value={system}
          onChange={(event) => onChange({ system: event.currentTarget.value })}
        />
      </div>
      <h3>{t("Sampling")}</h3>
      <SamplingForm value={sampling} under={under} onChange={(to) => onChange({ sampling: to })} />
      <footer class="form-foot">
        <SavePreset system={system} sampling={sampling} disabled={isEmpty} />
        <button
          type="button"
          class="button"
          disabled={isEmpty}
          onClick={() => onChange({ system: "", sampling: {} })}
        >
          {t("Use all defaults")}
        </button>
      </footer>
    </>
  );
}

function PresetChoice({ onChange }: Pick<FormProps, "onChange">): VNode | null {
  const id = useId();
  if (presets.value.length === 0) return null;
  return (
    <div class="stacked">
      <label for={id}>{t("Use a preset")}</label>
      <select
        id={id}
        class="field"
        value=""
        onChange={(event) => {
          const chosen = presets.value.find((one) => one.id === event.currentTarget.value);
          event.currentTarget.value = "";
          if (!chosen) return;
          onChange({ system: chosen.system, sampling: chosen.sampling });
          say(t("{name} is in use.", { name: quoted(chosen.name) }));
        }}
      >
        <option value="">{t("Choose…")}</option>
        {presets.value.map((one) => (
          <option key={one.id} value={one.id}>
            {one.name}
          </option>
        ))}
      </select>
    </div>
  );
}

/** Saves what is in the form under a name, so that other chats can use it. */
function SavePreset(now: { system: string; sampling: Sampling; disabled: boolean }): VNode {
  const [asked, ask] = useState(false);
  if (asked) return <PresetName now={now} onEnd={() => ask(false)} />;
  return (
    <button type="button" class="button" disabled={now.disabled} onClick={() => ask(true)}>
      {t("Save as preset…")}
    </button>
  );
}

interface PresetNameProps {
  now: { system: string; sampling: Sampling };
  onEnd: () => void;
}

function PresetName({ now, onEnd }: PresetNameProps): VNode {
  const [name, setName] = useState("");
  const input = useFocus<HTMLInputElement>();
  const save = (event: Event) => {
    event.preventDefault();
    const title = name.trim();
    if (!title) return;
    const { system, sampling } = now;
    const others = presets.value.filter((one) => one.name !== title);
    presets.value = [...others, { id: newId(), name: title, system, sampling }];
    onEnd();
    say(t("{title} is saved.", { title: quoted(title) }));
  };
  return (
    <form class="inline-form" onSubmit={save}>
      <input
        class="field"
        aria-label={t("Name of the preset")}
        placeholder={t("Name of the preset")}
        ref={input}
        value={name}
        onInput={(event) => setName(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Escape") return;
          event.preventDefault(); // else the dialog closes
          event.stopPropagation();
          onEnd();
        }}
      />
      <button type="submit" class="button primary" disabled={!name.trim()}>
        {t("Save")}
      </button>
    </form>
  );
}
