import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon, type IconName } from "../icon";
import { load, removeModel, unload } from "../state/models";
import type { Model } from "../types";
import { t, type Text } from "../words";
import { modelName } from "./format";
import { attempt } from "./toasts";

const SENSES: Record<string, { icon: IconName; says: Text }> = {
  image: { icon: "eye", says: "sees pictures" },
  audio: { icon: "ear", says: "hears sound" },
};

/** Icons for the kinds of input that a model takes beside text. */
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

/** The buttons to load, unload and delete a model of a router; `adjust` loads it with other settings. */
export function ModelActions({ model, adjust }: { model: Model; adjust: () => void }): VNode {
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
      {!deleting && status === "unloaded" && (
        <button type="button" class="icon-button" aria-label={t("Load {model} with settings…", { model: modelName(id) })} title={t("Load with settings…")} onClick={adjust}>
          <Icon name="settings" />
        </button>
      )}
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
