import type { VNode } from "preact";

import { t } from "../words";
import { currentModel } from "./ModelMenu";
import { Notice } from "./Notice";

/** What to know of a model that chats are not made for. */
export function ModelNotice(): VNode | null {
  const model = currentModel();
  if (model?.hasTemplate !== false) return null;
  return (
    <Notice icon="alert" about={`template ${model.id}`}>
      <p>
        {t("This model has no chat template. It is probably a base model, which continues texts and does not answer questions.")}
      </p>
    </Notice>
  );
}
