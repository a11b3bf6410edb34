import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { mcpServers, readPrompt, readResource, type McpPrompt, type McpResource } from "../state/mcp";
import { exposed } from "../talk/toolText";
import { t } from "../words";
import { attach, draft, setDraft } from "./draft";
import { Popover } from "./Popover";
import { attempt } from "./toasts";
import { focusComposer } from "./view";

/** The prompts and resources of the page's MCP servers. Only where there are some. */
export function McpMenu(): VNode | null {
  const servers = mcpServers.value.filter(({ prompts, resources }) => prompts.length + resources.length > 0);
  if (servers.length === 0) return null;
  return (
    <Popover button={<Icon name="plug" />} label={t("Prompts and resources")} buttonClass="icon-button" class="tools">
      {(close) =>
        servers.map(({ entry, prompts, resources }) => (
          <section key={entry.id} aria-label={entry.name}>
            <h3>{exposed(entry.name)}</h3>
            {prompts.map((prompt) => (
              <Prompt key={prompt.name} server={entry.id} prompt={prompt} close={close} />
            ))}
            {resources.map((resource) => (
              <Resource key={resource.uri} server={entry.id} resource={resource} close={close} />
            ))}
          </section>
        ))
      }
    </Popover>
  );
}

/** Puts a prompt where the message is written; one with arguments asks for them first. */
function Prompt({ server, prompt, close }: { server: string; prompt: McpPrompt; close: () => void }): VNode {
  const [values, setValues] = useState<Record<string, string> | null>(null);
  const use = (given: Record<string, string>) =>
    void attempt(async () => {
      const text = await readPrompt(server, prompt.name, given);
      setDraft({ text: [draft.value.text, text].filter(Boolean).join("\n\n") });
      close();
      focusComposer();
    });
  const press = () => (prompt.arguments.length > 0 ? setValues(values ? null : {}) : use({}));
  const isComplete = prompt.arguments.every(({ name, isRequired }) => !isRequired || values?.[name]?.trim());
  return (
    <>
      <Entry icon="edit" name={prompt.title} description={prompt.description} run={press} />
      {values && (
        <form
          class="mcp-form"
          onSubmit={(event) => {
            event.preventDefault();
            use(Object.fromEntries(Object.entries(values).filter(([, value]) => value)));
          }}
        >
          {prompt.arguments.map(({ name, description }) => (
            <label key={name} class="stacked">
              {exposed(name)}
              <input
                class="field"
                placeholder={exposed(description)}
                value={values[name] ?? ""}
                onInput={(event) => setValues({ ...values, [name]: event.currentTarget.value })}
              />
            </label>
          ))}
          <button type="submit" class="button primary" disabled={!isComplete}>
            {t("Use")}
          </button>
        </form>
      )}
    </>
  );
}

/** Attaches a resource. */
function Resource({ server, resource, close }: { server: string; resource: McpResource; close: () => void }): VNode {
  const run = () => {
    close();
    void attach(readResource(server, resource).then((file) => [file])).then(focusComposer);
  };
  return <Entry icon="paperclip" name={resource.name} description={resource.description} run={run} />;
}

interface EntryProps {
  icon: "edit" | "paperclip";
  name: string;
  description: string;
  run: () => void;
}

function Entry({ icon, name, description, run }: EntryProps): VNode {
  return (
    <button type="button" class="menu-entry" title={exposed(description)} onClick={run}>
      <Icon name={icon} />
      <span class="entry-name">{exposed(name)}</span>
    </button>
  );
}
