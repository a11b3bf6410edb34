import type { VNode } from "preact";

import { Icon } from "../icon";
import { chosenModel } from "../state/choice";
import { models, props } from "../state/server";
import type { Model } from "../types";
import { t } from "../words";
import { bytes, contextSize, modelName, percent, short } from "./format";
import { later } from "./later";
import { Popover } from "./Popover";

/** The list comes once the page is there. */
export const ModelList = later(async () => (await import("./ModelList")).ModelList);

/** The model that answers in the open chat; null until the server has named it. */
export function currentModel(): Model | null {
  const name = chosenModel.value;
  return models.value.find(({ id, aliases }) => id === name || aliases.includes(name)) ?? null;
}

/** The name of the model; where there are several, a list to choose from. */
export function ModelMenu(): VNode | null {
  const current = currentModel();
  if (!current) return null;
  const name = modelName(current.id);
  const isRouter = props.value?.role === "router";
  if (models.value.length === 1 && !isRouter) {
    return (
      <span class="model-name" title={describe(current)}>
        {name}
      </span>
    );
  }
  const button = (
    <>
      <span class="visually-hidden">{t("Model:")}{" "}</span>
      <span class="model-name">{name}</span>
      <Icon name="chevron-down" />
    </>
  );
  return (
    <Popover button={button} buttonClass="row-button model-button" panelLabel={t("Choose a model")} class="models">
      {(close) => <ModelList current={current} isRouter={isRouter} close={close} />}
    </Popover>
  );
}

/** What is known of a model, in a line. */
export function describe(model: Model): string {
  const states: Record<string, string> = {
    unloaded: t("not loaded"),
    downloading: t("is being downloaded"),
    loading: t("is loading"),
    sleeping: t("sleeps"),
  };
  const share = model.progress === undefined ? "" : `, ${percent(model.progress)}`;
  const state = states[model.status];
  return [
    model.toy && t("toy model"),
    model.failed ? t("has failed") : state && state + share,
    model.parameters > 0 && t("{number} parameters", { number: short(model.parameters) }),
    model.size > 0 && bytes(model.size),
    model.contextSize > 0 && t("{size} context", { size: contextSize(model.contextSize) }),
  ]
    .filter(Boolean)
    .join(" · ");
}
