import type { VNode } from "preact";

import { Icon } from "../icon";
import { chosenModel } from "../state/choice";
import { models, props } from "../state/server";
import type { Model } from "../types";
import { t } from "../words";
import { describe, modelName } from "./format";
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
