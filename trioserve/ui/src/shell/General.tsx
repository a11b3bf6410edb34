import type { VNode } from "preact";

import { props } from "../state/server";
import { settings } from "../state/settings";
import { canRead } from "../state/voices";
import type { Settings } from "../types";
import { LANGUAGES, t } from "../words";
import { Choice } from "./Choice";
import { canDictate } from "./dictation";
import { KeyField } from "./KeyField";
import { keyNames } from "./keys";
import { Reading } from "./Reading";
import { mac } from "./shortcuts";
import { Switch } from "./Switch";

/** Settings of the page's looks and behavior, and the key that it shows to the server. */
export function General(): VNode {
  const { theme, language, sendKey, showReasoning, showStats, titles, dictation } = settings.value;
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
        title={t("Language")}
        value={language}
        options={{ auto: t("System"), ...LANGUAGES }}
        onChange={(to) => set({ language: to })}
      />
      <Choice
        title={t("Send messages with")}
        value={sendKey}
        options={{ enter: "Enter", "mod-enter": mod }}
        onChange={(to) => set({ sendKey: to })}
      />
      <Switch
        label={t("Expand reasoning")}
        help={t("Shows the reasoning of a model without a click.")}
        value={showReasoning}
        onChange={(to) => set({ showReasoning: to })}
      />
      <Switch
        label={t("Statistics under answers")}
        help={t("Tokens per second, time to first token, and the used share of the context.")}
        value={showStats}
        onChange={(to) => set({ showStats: to })}
      />
      <Switch
        label={t("Titles by the model")}
        help={t("The model writes a title for each new chat while the server is idle.")}
        value={titles}
        onChange={(to) => set({ titles: to })}
      />
      {canDictate && (
        <Switch
          label={t("Dictation by the browser")}
          help={t("A microphone beside the message. Some browsers send what you say to their maker, not to this server.")}
          value={dictation}
          onChange={(to) => set({ dictation: to })}
        />
      )}
      {canRead() && <Reading />}
      <KeyField />
      {props.value?.build_info && <p class="hint">{t("Server: {build_info}", { build_info: props.value.build_info })}</p>}
    </>
  );
}
