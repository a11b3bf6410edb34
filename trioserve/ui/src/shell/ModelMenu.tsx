import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { openChat, setChat } from "../state/chats";
import { chosenModel } from "../state/choice";
import { models, props } from "../state/server";
import { settings } from "../state/settings";
import type { Model } from "../types";
import { t } from "../words";
import { bytes, contextSize, modelName, percent, short } from "./format";
import { DownloadForm, ModelActions, Senses } from "./ModelActions";
import { Popover } from "./Popover";
import { attempt } from "./toasts";

/** The number of models from which on the menu has a search. */
const MANY = 8;

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

interface ListProps {
  current: Model;
  isRouter: boolean;
  close: () => void;
}

function ModelList({ current, isRouter, close }: ListProps): VNode {
  const [text, setText] = useState("");
  const all = models.value;
  const words = text.toLowerCase().split(/\s+/);
  const fits = (model: Model) => {
    const names = [model.id, ...model.aliases].join(" ").toLowerCase();
    return words.every((word) => names.includes(word));
  };
  const shown = all.filter(fits);
  const pick = (model: Model) => {
    close();
    void attempt(() => choose(model));
  };
  return (
    <>
      {all.length >= MANY && (
        <input
          class="field"
          data-first
          type="search"
          placeholder={t("Search")}
          aria-label={t("Search the models")}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => event.key === "Enter" && shown[0] && pick(shown[0])}
        />
      )}
      <ul class="model-list" aria-label={t("Models")}>
        {shown.map((model) => (
          <li key={model.id} class="model-row">
            <button
              type="button"
              class="menu-entry model-entry"
              data-first={model.id === current.id && all.length < MANY ? true : undefined}
              aria-current={model.id === current.id}
              onClick={() => pick(model)}
            >
              <span class="model-entry-name">
                {modelName(model.id)} <Senses model={model} />
              </span>
              <span class="hint">{describe(model)}</span>
              {model.id === current.id && <Icon name="check" />}
            </button>
            {isRouter && <ModelActions model={model} />}
            {model.progress !== undefined && <progress value={model.progress} aria-label={describe(model)} />}
          </li>
        ))}
      </ul>
      {shown.length === 0 && <p class="hint">{t("No model has this name.")}</p>}
      {isRouter && <DownloadForm />}
    </>
  );
}

/** Use a model in the open chat; in one that is new, for the chats that come as well. */
async function choose(model: Model): Promise<void> {
  const open = openChat.value;
  if (!open?.path.length) settings.value = { ...settings.value, model: model.id };
  if (open) await setChat(open.chat.id, { model: model.id });
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
