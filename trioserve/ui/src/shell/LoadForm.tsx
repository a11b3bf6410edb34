import type { VNode } from "preact";
import { useEffect, useId, useState } from "preact/hooks";

import { loadWith, needsOf, type LoadSettings } from "../state/hub";
import { t, type Text } from "../words";
import { Dialog } from "./Dialog";
import { modelName } from "./format";
import { fits } from "./Models";
import { attempt } from "./toasts";
import { overlay } from "./view";

const NUMBERS: { name: "ctx_size" | "parallel" | "n_gpu_layers"; label: Text; help: Text; min: number }[] = [
  { name: "ctx_size", label: "Context", help: "In tokens, for all slots together; 0 is that of the model.", min: 0 },
  { name: "parallel", label: "Slots", help: "Requests that run at the same time.", min: 1 },
  { name: "n_gpu_layers", label: "Layers on the GPU", help: "The others stay in RAM.", min: 0 },
];

/** Data types of the KV cache that people choose. */
const TYPES = ["f16", "bf16", "q8_0", "q5_1", "q4_0"];

/** Milliseconds without a change after which the memory is estimated. */
const PATIENCE = 600;

/** The settings to load a model with, and the memory that it needs with them. */
export function LoadForm({ model }: { model: string }): VNode {
  const id = useId();
  const [how, setHow] = useState<LoadSettings>({});
  const says = useEstimate(model, how);
  const set = (name: keyof LoadSettings, value: string) => {
    const { [name]: _, ...rest } = how;
    setHow(value === "" ? rest : { ...rest, [name]: name.startsWith("cache") ? value : Number(value) });
  };
  const submit = (event: Event) => {
    event.preventDefault();
    void attempt(async () => {
      await loadWith(model, how);
      overlay.value = null;
    });
  };
  return (
    <Dialog title={t("Load {model}", { model: modelName(model) })} class="load" onClose={() => (overlay.value = null)}>
      <form class="models-body" onSubmit={submit}>
        {NUMBERS.map(({ name, label, help, min }) => (
          <div key={name} class="setting wide">
            <label for={`${id}-${name}`}>{t(label)}</label>
            <input
              id={`${id}-${name}`}
              class="field"
              type="number"
              min={min}
              placeholder={t("as configured")}
              value={how[name] ?? ""}
              onInput={(event) => set(name, event.currentTarget.value)}
            />
            <p class="hint">{t(help)}</p>
          </div>
        ))}
        {(["cache_type_k", "cache_type_v"] as const).map((name) => (
          <div key={name} class="setting wide">
            <label for={`${id}-${name}`}>{name === "cache_type_k" ? t("Type of keys in the KV cache") : t("Type of values in the KV cache")}</label>
            <select id={`${id}-${name}`} class="field" value={how[name] ?? ""} onChange={(event) => set(name, event.currentTarget.value)}>
              <option value="">{t("as configured")}</option>
              {TYPES.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </div>
        ))}
        <footer class="form-foot">
          <p class="hint" role="status">
            {says}
          </p>
          <button type="submit" class="button primary">
            {t("Load")}
          </button>
        </footer>
      </form>
    </Dialog>
  );
}

/** The estimate of a model's memory as text, updated shortly after the settings change. */
function useEstimate(model: string, how: LoadSettings): string {
  const [says, say] = useState("");
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(() => {
      say(t("estimating…"));
      needsOf(model, how, abort.signal).then(
        (needs) => say(fits(needs)),
        (error: unknown) => abort.signal.aborted || say(error instanceof Error ? error.message : String(error)),
      );
    }, PATIENCE);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [model, how]);
  return says;
}
