import type { VNode } from "preact";
import { useId, useState } from "preact/hooks";

import { Icon } from "../icon";
import { isObject } from "../state/json";
import { props as serverProps } from "../state/server";
import { withValue } from "../state/settings";
import type { Sampling } from "../types";
import { t } from "../words";
import { type Field, groups, read, show } from "./sampling";

interface SamplingProps {
  value: Sampling;
  /** Values that apply where `value` has none, before the server's own defaults. */
  under: Sampling;
  onChange: (value: Sampling) => void;
}

/** All settings of sampling. An empty field means the default, which it shows in grey. */
export function SamplingForm({ value, under, onChange }: SamplingProps): VNode {
  const set = (name: string, to: Sampling[string] | undefined) => onChange(withValue(value, name, to));
  const defaults = { ...serverProps.value?.default_generation_settings.params, ...under };
  const rows = (fields: readonly Field[]) =>
    fields.map((field) => (
      <NumberRow
        key={field.name}
        field={field}
        value={value[field.name]}
        byDefault={show(field, defaults[field.name])}
        onChange={(to) => set(field.name, to)}
      />
    ));
  const [first, ...others] = groups;
  return (
    <div class="sampling">
      {first && rows(first.fields)}
      <Reasoning value={value.reasoning_effort} under={under.reasoning_effort} onChange={set} />
      <StopWords value={value.stop} onChange={set} />
      <Schema value={value.json_schema} onChange={set} />
      {others.map((group) => (
        <details key={group.title} open={group.fields.some((field) => field.name in value)}>
          <summary>{t(group.title)}</summary>
          {rows(group.fields)}
        </details>
      ))}
    </div>
  );
}

interface NumberRowProps {
  field: Field;
  value: Sampling[string] | undefined;
  byDefault: string;
  onChange: (value: number | undefined) => void;
}

function NumberRow({ field, value, byDefault, onChange }: NumberRowProps): VNode {
  const id = useId();
  // The text being written, which need not be a number yet.
  const [draft, setDraft] = useState<string | null>(null);
  const text = draft ?? show(field, value);
  const reading = read(field, text);
  const problem = typeof reading === "object" && "problem" in reading ? reading.problem : "";
  const keep = (written: string) => {
    const now = read(field, written);
    if (now !== "default" && "problem" in now) return;
    setDraft(null);
    onChange(now === "default" ? undefined : now.value);
  };
  const isSet = value !== undefined || draft;
  return (
    <div class={isSet ? "setting set" : "setting"}>
      <label for={id}>{t(field.label)}</label>
      {field.slider && (
        <input
          type="range"
          aria-label={t("{label}, as a slider", { label: t(field.label) })}
          min={field.slider[0]}
          max={field.slider[1]}
          step={field.whole ? 1 : 0.01}
          value={text || byDefault}
          onInput={(event) => setDraft(event.currentTarget.value)}
          onChange={(event) => keep(event.currentTarget.value)}
        />
      )}
      <input
        id={id}
        class="field number"
        inputMode="decimal"
        autocomplete="off"
        placeholder={byDefault || t("default")}
        value={text}
        aria-invalid={problem !== ""}
        aria-describedby={`${id}-help`}
        onInput={(event) => setDraft(event.currentTarget.value)}
        onChange={(event) => keep(event.currentTarget.value)}
      />
      <button
        type="button"
        class="icon-button"
        aria-label={t("Use the default of {label}", { label: t(field.label) })}
        title={t("Use the default")}
        disabled={!isSet}
        onClick={() => {
          setDraft(null);
          onChange(undefined);
        }}
      >
        <Icon name="reset" />
      </button>
      <p id={`${id}-help`} class={problem ? "hint problem" : "hint"}>
        {problem || t(field.help)}
      </p>
    </div>
  );
}

interface NamedProps {
  value: Sampling[string] | undefined;
  under?: Sampling[string];
  onChange: (name: string, value: Sampling[string] | undefined) => void;
}

function Reasoning({ value, under, onChange }: NamedProps): VNode {
  const id = useId();
  return (
    <div class="setting wide">
      <label for={id}>{t("Reasoning")}</label>
      <select
        id={id}
        class="field"
        value={String(value ?? "")}
        onChange={(event) => onChange("reasoning_effort", event.currentTarget.value || undefined)}
      >
        <option value="">{under ? t("Default ({value})", { value: String(under) }) : t("Default")}</option>
        <option value="none">{t("Off")}</option>
        <option value="low">{t("Low")}</option>
        <option value="medium">{t("Medium")}</option>
        <option value="high">{t("High")}</option>
      </select>
      <p class="hint">{t("How much the model thinks before it answers, if it is one that can.")}</p>
    </div>
  );
}

/** The schema that answers follow. */
function Schema({ value, onChange }: NamedProps): VNode {
  const id = useId();
  const [draft, setDraft] = useState<string | null>(null);
  const text = draft ?? String(value ?? "");
  const isWrong = text.trim() !== "" && !isObject(text);
  return (
    <div class="setting wide">
      <label for={id}>{t("Answers follow a JSON Schema")}</label>
      <textarea
        id={id}
        class="field mono"
        rows={text ? 6 : 1}
        spellcheck={false}
        placeholder='{"type": "object", "properties": {…}}'
        value={text}
        aria-invalid={isWrong}
        aria-describedby={`${id}-help`}
        onInput={(event) => setDraft(event.currentTarget.value)}
        onChange={(event) => {
          const written = event.currentTarget.value.trim();
          if (written && !isObject(written)) return;
          setDraft(null);
          onChange("json_schema", written || undefined);
        }}
      />
      <p id={`${id}-help`} class={isWrong ? "hint problem" : "hint"}>
        {t(isWrong ? "This is no object in JSON." : "The model can write nothing else then; {} is any JSON.")}
      </p>
    </div>
  );
}

function StopWords({ value, onChange }: NamedProps): VNode {
  const id = useId();
  const words = Array.isArray(value) ? value : [];
  return (
    <div class="setting wide">
      <label for={id}>{t("Stop at")}</label>
      <textarea
        id={id}
        class="field"
        rows={1}
        value={words.join("\n")}
        onChange={(event) => {
          const lines = event.currentTarget.value.split("\n").filter((line) => line !== "");
          onChange("stop", lines.length ? lines : undefined);
        }}
      />
      <p class="hint">{t("The answer ends where one of these texts would begin; one a line.")}</p>
    </div>
  );
}
