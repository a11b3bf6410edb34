import type { VNode } from "preact";
import { useEffect, useId, useState } from "preact/hooks";

import { chosenModel } from "../state/choice";
import { settings, SPEEDS } from "../state/settings";
import { serverSpeaks, type Speaker, voicesOf } from "../state/voices";
import type { Settings } from "../types";
import { language, t } from "../words";
import { Choice } from "./Choice";
import { Switch } from "./Switch";
import { attempt } from "./toasts";

/** Settings of reading aloud. */
export function Reading(): VNode {
  const { readAll, readSpeed } = settings.value;
  const set = (change: Partial<Settings>) => (settings.value = { ...settings.value, ...change });
  const speeds = Object.fromEntries(SPEEDS.map((speed) => [`${speed}×`, `${speed.toLocaleString(language.value)}×`]));
  return (
    <>
      <Switch
        label={t("Read every answer aloud")}
        help={t("Sentence by sentence, while it is written.")}
        value={readAll}
        onChange={(to) => set({ readAll: to })}
      />
      <Choice title={t("Speed of reading")} value={`${readSpeed}×`} options={speeds} onChange={(to) => set({ readSpeed: parseFloat(to) })} />
      {serverSpeaks() && <VoiceChoice model={chosenModel.value} />}
    </>
  );
}

function VoiceChoice({ model }: { model: string }): VNode {
  const id = useId();
  const [voices, setVoices] = useState<Speaker[]>([]);
  useEffect(() => void attempt(async () => setVoices(await voicesOf(model))), [model]);
  const { voice } = settings.value;
  const others = voices.filter((one) => one.id !== "default");
  return (
    <div class="stacked">
      <label for={id}>{t("Voice")}</label>
      <select id={id} class="field" value={voice} onChange={(event) => (settings.value = { ...settings.value, voice: event.currentTarget.value })}>
        <option value="">{t("Default")}</option>
        {voice && !others.some((one) => one.id === voice) && <option value={voice}>{voice}</option>}
        {others.map((one) => (
          <option key={one.id} value={one.id}>
            {one.name}
          </option>
        ))}
      </select>
    </div>
  );
}
