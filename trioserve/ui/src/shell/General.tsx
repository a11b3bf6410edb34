import type { VNode } from "preact";
import { useId } from "preact/hooks";

import { props } from "../state/server";
import { settings } from "../state/settings";
import type { Settings } from "../types";
import { t } from "../words";
import { KeyField } from "./KeyField";
import { keyNames } from "./keys";
import { mac } from "./shortcuts";
import { Switch } from "./Switch";

/** How the page looks and behaves, and the key that it shows to the server. */
export function General(): VNode {
  const { theme, sendKey, showReasoning, showStats } = settings.value;
  const set = (change: Partial<Settings>) => (settings.value = { ...settings.value, ...change });
  const mod = keyNames({ key: "Enter", mod: true }, mac).join(mac ? "" : "+");
  return (
    <>
      <Choice
        title={t("Theme")}
        value={theme}
        options={{ auto: t("System"), light: t("Light"), dark: t("Dark") }}
        onChange={(to) => set({ theme: to })}
      />
      <Choice
        title={t("Send messages with")}
        value={sendKey}
        options={{ enter: "Enter", "mod-enter": mod }}
        onChange={(to) => set({ sendKey: to })}
      />
      <Switch
        label={t("Unfold reasoning")}
        help={t("Shows what a model thinks before it answers, without a click.")}
        value={showReasoning}
        onChange={(to) => set({ showReasoning: to })}
      />
      <Switch
        label={t("Figures under answers")}
        help={t("Tokens a second, the time to the first token, and how much of the context is used.")}
        value={showStats}
        onChange={(to) => set({ showStats: to })}
      />
      <KeyField />
      {props.value?.build_info && <p class="hint">{t("Server: {build_info}", { build_info: props.value.build_info })}</p>}
    </>
  );
}

interface ChoiceProps<Value extends string> {
  title: string;
  value: Value;
  options: Record<Value, string>;
  onChange: (value: Value) => void;
}

function Choice<Value extends string>({ title, value, options, onChange }: ChoiceProps<Value>): VNode {
  const name = useId();
  return (
    <fieldset class="choice">
      <legend>{title}</legend>
      <div class="segments">
        {(Object.entries(options) as [Value, string][]).map(([each, label]) => (
          <label key={each}>
            <input type="radio" name={name} checked={each === value} onChange={() => onChange(each)} />
            <span>{label}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}
