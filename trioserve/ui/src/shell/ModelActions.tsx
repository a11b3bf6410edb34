import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon, type IconName } from "../icon";
import { download, load, removeModel, unload } from "../state/models";
import type { Model } from "../types";
import { t, type Text } from "../words";
import { modelName } from "./format";
import { attempt } from "./toasts";

const SENSES: Record<string, { icon: IconName; says: Text }> = {
  image: { icon: "eye", says: "sees pictures" },
  audio: { icon: "ear", says: "hears sound" },
};

/** What a model takes beside text. */
export function Senses({ model }: { model: Model }): VNode {
  const known = model.takes.flatMap((one) => SENSES[one] ?? []);
  return (
    <span class="senses">
      {known.map(({ icon, says }) => (
        <span key={icon} role="img" aria-label={t(says)} title={t(says)}>
          <Icon name={icon} />
        </span>
      ))}
    </span>
  );
}

/** What a router can do with a model. */
export function ModelActions({ model }: { model: Model }): VNode {
  const [deleting, setDeleting] = useState(false);
  const { id, status, removable } = model;
  const action = (label: string, run: () => Promise<void>) => (
    <button type="button" class="button" aria-label={`${label} ${modelName(id)}`} onClick={() => void attempt(run)}>
      {label}
    </button>
  );
  return (
    <span class="model-actions">
      {deleting && action(t("Delete"), () => removeModel(id))}
      {!deleting && status === "unloaded" && action(t("Load"), () => load(id))}
      {!deleting && (status === "loaded" || status === "sleeping") && action(t("Unload"), () => unload(id))}
      {!deleting && (status === "loading" || status === "downloading") && action(t("Cancel"), () => unload(id))}
      {removable && status !== "downloading" && (
        <button
          type="button"
          class="icon-button"
          aria-label={deleting ? t("Keep it") : t("Delete {id}…", { id: modelName(id) })}
          title={deleting ? t("Keep it") : t("Delete the files of this model…")}
          onClick={() => setDeleting(!deleting)}
        >
          <Icon name={deleting ? "close" : "trash"} />
        </button>
      )}
    </span>
  );
}

/** Small models that many computers can run, as a beginning. */
const SUGGESTIONS = ["ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "Qwen/Qwen3-4B-GGUF:Q4_K_M"];

/** Where a model of the hub is named, to download it. */
export function DownloadForm(): VNode {
  const [name, setName] = useState("");
  return (
    <form
      class="download"
      onSubmit={(event) => {
        event.preventDefault();
        void attempt(async () => {
          await download(name.trim());
          setName("");
        });
      }}
    >
      <input
        class="field"
        aria-label={t("A model of Hugging Face")}
        placeholder={t("user/model:Q4_K_M")}
        list="suggested-models"
        autocomplete="off"
        value={name}
        onInput={(event) => setName(event.currentTarget.value)}
      />
      <datalist id="suggested-models">
        {SUGGESTIONS.map((one) => (
          <option key={one} value={one} />
        ))}
      </datalist>
      <button type="submit" class="button" disabled={name.trim() === ""}>
        <Icon name="download" />
        {t("Download")}
      </button>
    </form>
  );
}
