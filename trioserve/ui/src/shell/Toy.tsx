import type { VNode } from "preact";

import { props } from "../state/server";
import { send } from "../state/talk";
import type { Model } from "../types";
import { t } from "../words";
import { attempt } from "./toasts";

/** The limits of a toy, and the way to a real model. */
export function Toy({ model }: { model: Model }): VNode {
  const known = props.value; // null until the server has answered
  return (
    <>
      <p class="hint welcome-advice">
        {t("This model is a toy to try the server with: its sentences are simple, and it knows next to nothing.")}{" "}
        {known &&
          (known.role === "router"
            ? t("Download a real one in the menu of models, at the top.")
            : t("For a real one, start trioserve without -m, and download it on this page."))}
      </p>
      <div class="preset-chips" role="group" aria-label={t("Examples")}>
        {model.examples.map((text) => (
          <button key={text} type="button" class="button" onClick={() => void attempt(() => send(text, []))}>
            {text}
          </button>
        ))}
      </div>
    </>
  );
}
