import type { VNode } from "preact";
import { useId, useState } from "preact/hooks";

import { server } from "../state/server";
import { settings } from "../state/settings";
import { t } from "../words";
import { useFocus } from "./focus";

/** The API key. It is kept in this browser, and sent to this server only. */
export function KeyField({ autofocus = false }: { autofocus?: boolean }): VNode {
  const id = useId();
  const input = useFocus<HTMLInputElement>(autofocus);
  const [draft, setDraft] = useState(settings.value.apiKey);
  const save = (event: Event) => {
    event.preventDefault();
    settings.value = { ...settings.value, apiKey: draft.trim() };
  };
  const isNew = draft.trim() !== settings.value.apiKey;
  const refused = server.value.state === "needs-key" && settings.value.apiKey !== "" && !isNew;
  return (
    <form class="stacked" onSubmit={save}>
      <label for={id}>{t("API key")}</label>
      <div class="inline-form">
        <input
          id={id}
          class="field"
          type="password"
          autocomplete="off"
          spellcheck={false}
          ref={input}
          value={draft}
          aria-invalid={refused}
          aria-describedby={`${id}-help`}
          onInput={(event) => setDraft(event.currentTarget.value)}
        />
        <button type="submit" class="button primary" disabled={!isNew}>
          {t("Save")}
        </button>
      </div>
      <p id={`${id}-help`} class={refused ? "hint problem" : "hint"}>
        {refused ? t("The server does not accept this key.") : t("It is kept in this browser, and sent to this server only.")}
      </p>
    </form>
  );
}
