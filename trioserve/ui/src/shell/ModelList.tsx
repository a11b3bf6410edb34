import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { openChat, setChat } from "../state/chats";
import { afterDownloads, coming } from "../state/downloads";
import { load } from "../state/models";
import { models } from "../state/server";
import { settings } from "../state/settings";
import type { Model } from "../types";
import { t } from "../words";
import { describe, modelName } from "./format";
import { ModelActions, Senses } from "./ModelActions";
import { attempt, say } from "./toasts";
import { overlay, type Overlay } from "./view";

/** The number of models from which on the menu has a search. */
const MANY = 8;

interface ListProps {
  current: Model;
  isRouter: boolean;
  close: () => void;
}

/** The models to choose from, and what a router can do with them. */
export function ModelList({ current, isRouter, close }: ListProps): VNode {
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
            {isRouter && <ModelActions model={model} adjust={() => over({ load: model.id }, close)} />}
            {model.progress !== undefined && <progress value={model.progress} aria-label={describe(model)} />}
          </li>
        ))}
      </ul>
      {shown.length === 0 && <p class="hint">{t("No model has this name.")}</p>}
      {isRouter && (
        <button type="button" class="menu-entry" onClick={() => over("models", close)}>
          <Icon name="download" />
          {coming.value.length > 0 ? t("Downloads ({number})", { number: coming.value.length }) : t("Get models…")}
        </button>
      )}
    </>
  );
}

function over(what: Overlay, close: () => void): void {
  close();
  overlay.value = what;
}

/** Use a model in the open chat; in one that is new, for the chats that come as well. */
async function choose(model: Model): Promise<void> {
  const open = openChat.value;
  if (!open?.path.length) settings.value = { ...settings.value, model: model.id };
  if (open) await setChat(open.chat.id, { model: model.id });
}

// This part of the page comes soon after its start.
afterDownloads((model) => {
  say(t("{model} is here.", { model: modelName(model) }), { label: t("Load"), run: () => load(model) });
});
