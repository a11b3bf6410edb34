import type { VNode } from "preact";
import { useEffect, useId } from "preact/hooks";

import { props } from "../state/server";
import { settings } from "../state/settings";
import { choice, choose, readTools } from "../state/tools";
import { exposed } from "../talk/toolText";
import type { ServerTool } from "../types";
import { t } from "../words";
import { Switch } from "./Switch";
import { attempt } from "./toasts";
import { wordsOf } from "./toolWords";

/** The tools of the server and of the page, each with a switch. */
export function ToolPanel({ all }: { all: ServerTool[] }): VNode {
  useEffect(() => void attempt(() => readTools(props.value?.endpoint_tools === true)), []); // MCP servers may have come
  const { on } = choice.value;
  const areAllOn = all.every(({ name }) => on.includes(name));
  const origins = [...new Set(all.map(({ origin }) => origin))];
  return (
    <>
      <header class="tools-head">
        <h2>{t("Tools")}</h2>
        <button
          type="button"
          class="button"
          data-first
          onClick={() => change({ on: areAllOn ? [] : all.map(({ name }) => name) })}
        >
          {areAllOn ? t("None") : t("All")}
        </button>
      </header>
      <p class="hint">{t("Those that are on run when the model calls them in this chat.")}</p>
      {origins.map((origin) => (
        <section key={origin} aria-label={origin || t("Built in")}>
          <h3>{exposed(origin) || t("Built in")}</h3>
          {all.filter((tool) => tool.origin === origin).map((tool) => (
            <Row key={tool.name} tool={tool} />
          ))}
        </section>
      ))}
      {all.some(({ origin }) => origin === "") && <Folder />}
      <Default />
    </>
  );
}

function Row({ tool }: { tool: ServerTool }): VNode {
  const { name, writes } = tool;
  const { title, help } = wordsOf(tool);
  const { on, allowed } = choice.value;
  const id = useId();
  const isOn = on.includes(name);
  const changed = (list: readonly string[], isIn: boolean) => [...list.filter((one) => one !== name), ...(isIn ? [name] : [])];
  return (
    <div class="tool-row">
      <Switch
        label={exposed(title)}
        help={exposed(help)}
        value={isOn}
        onChange={(to) => change({ on: changed(on, to) })}
      />
      {writes && !isOn && <p class="tool-asks soft">{t("It can change things.")}</p>}
      {writes && isOn && (
        <p class="tool-asks">
          <input
            id={id}
            type="checkbox"
            checked={!allowed.includes(name)}
            onChange={(event) => change({ allowed: changed(allowed, !event.currentTarget.checked) })}
          />
          <label for={id}>{t("Ask me before each call, as it can change things")}</label>
        </p>
      )}
    </div>
  );
}

/** The folder that the built-in tools begin in. */
function Folder(): VNode {
  const id = useId();
  return (
    <div class="stacked">
      <label for={id}>{t("Folder")}</label>
      <input
        id={id}
        class="field"
        placeholder={t("The server’s own")}
        spellcheck={false}
        autocomplete="off"
        value={choice.value.cwd}
        onChange={(event) => change({ cwd: event.currentTarget.value.trim() })}
      />
    </div>
  );
}

/** Makes what this chat has what new chats begin with. */
function Default(): VNode {
  const isDefault = JSON.stringify(settings.value.tools) === JSON.stringify(choice.value);
  return (
    <footer>
      <button
        type="button"
        class="button"
        disabled={isDefault}
        onClick={() => (settings.value = { ...settings.value, tools: choice.value })}
      >
        {isDefault ? t("New chats begin with these") : t("Use these for new chats")}
      </button>
    </footer>
  );
}

function change(how: Parameters<typeof choose>[0]): void {
  void attempt(() => choose(how));
}
