import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { newId } from "../state/ids";
import { connect, mcpServers, type McpState } from "../state/mcp";
import { hasProxy } from "../state/server";
import { settings } from "../state/settings";
import { exposed } from "../talk/toolText";
import type { McpEntry } from "../types";
import { several, t } from "../words";
import { count } from "./format";
import { attempt } from "./toasts";

/** The MCP servers that the page itself is connected to. */
export function Mcp(): VNode {
  if (!hasProxy.value) {
    return <p class="lead">{t("To add MCP servers here, start the server with --ui-mcp-proxy: browsers do not reach them without it.")}</p>;
  }
  return (
    <>
      <p class="lead">{t("The page connects to these MCP servers. Their addresses and keys stay in this browser. Turn their tools on with the button beside the message.")}</p>
      <ul class="presets">
        {mcpServers.value.map((one) => (
          <Row key={one.entry.id} server={one} />
        ))}
      </ul>
      <AddForm />
    </>
  );
}

function Row({ server }: { server: McpState }): VNode {
  const { entry } = server;
  const name = exposed(entry.name);
  const drop = () => (settings.value = { ...settings.value, mcp: settings.value.mcp.filter(({ id }) => id !== entry.id) });
  return (
    <li class="preset mcp-server">
      <strong>{name}</strong>
      <button type="button" class="button" onClick={() => void attempt(() => connect(entry))}>
        {t("Connect again")}
      </button>
      <button type="button" class="icon-button" aria-label={t("Remove {name}", { name })} title={t("Remove")} onClick={drop}>
        <Icon name="trash" />
      </button>
      <p class="hint">{exposed(entry.url)}</p>
      <p class={server.state === "failed" ? "hint problem" : "hint"} role="status">
        {says(server)}
      </p>
    </li>
  );
}

function says({ state, message, tools, prompts, resources }: McpState): string {
  if (state === "connecting") return t("Connecting…");
  if (state === "failed") return exposed(message);
  return [
    several(tools.length, "{number} tool", "{number} tools", { number: count(tools.length) }),
    several(prompts.length, "{number} prompt", "{number} prompts", { number: count(prompts.length) }),
    several(resources.length, "{number} resource", "{number} resources", { number: count(resources.length) }),
  ].join(" · ");
}

const EMPTY = { name: "", url: "", token: "" };

function AddForm(): VNode {
  const [draft, setDraft] = useState(EMPTY);
  const url = URL.canParse(draft.url.trim()) ? new URL(draft.url.trim()) : null;
  const isUrl = url?.protocol === "https:" || url?.protocol === "http:";
  const add = (event: Event) => {
    event.preventDefault();
    if (!isUrl) return;
    const entry: McpEntry = { id: newId(), name: draft.name.trim() || url.hostname, url: url.href, token: draft.token.trim() };
    settings.value = { ...settings.value, mcp: [...settings.value.mcp, entry] };
    setDraft(EMPTY);
  };
  const field = (name: keyof typeof EMPTY) => ({
    class: "field",
    autocomplete: "off",
    spellcheck: false,
    value: draft[name],
    onInput: (event: { currentTarget: HTMLInputElement }) => setDraft({ ...draft, [name]: event.currentTarget.value }),
  });
  return (
    <form class="mcp-form" onSubmit={add}>
      <h3>{t("Add an MCP server")}</h3>
      <label class="stacked">
        {t("Address")}
        <input type="url" placeholder="https://example.com/mcp" {...field("url")} />
      </label>
      <label class="stacked">
        {t("Name")}
        <input type="text" {...field("name")} />
      </label>
      <label class="stacked">
        {t("Access token, if it needs one")}
        <input type="password" {...field("token")} />
      </label>
      <button type="submit" class="button primary" disabled={!isUrl}>
        {t("Add")}
      </button>
    </form>
  );
}
