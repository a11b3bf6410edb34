// Calls of tools, and what the tools said.

import type { VNode } from "preact";

import { pageTools } from "../state/mcp";
import type { ToolCall } from "../types";
import { t } from "../words";
import { CodeBlock } from "./Code";
import { Fold } from "./Fold";
import { pretty, readArguments } from "./toolCalls";
import { exposed } from "./toolText";

/** The calls of tools that the model asks for. */
export function ToolCalls({ calls, writing }: { calls: ToolCall[]; writing: boolean }): VNode {
  return (
    <>
      {calls.map((call, index) => (
        <Fold key={index} class="card" icon="tool" title={title(t("Calls"), titleOf(call.name))} open={writing}>
          <div class="card-body">
            <CallArguments written={call.arguments} />
          </div>
        </Fold>
      ))}
    </>
  );
}

/** The title of one of the page’s tools, or else the name. */
function titleOf(name: string | undefined): string | undefined {
  const tool = pageTools.value.find((one) => one.name === name);
  return tool ? exposed(tool.title) : name;
}

function title(what: string, tool: string | undefined): VNode {
  return (
    <>
      {what} <bdi class="name">{tool || t("a tool")}</bdi>
    </>
  );
}

/** The arguments of a call. */
export function CallArguments({ written }: { written: string }): VNode {
  const read = readArguments(written);
  if ("raw" in read) return <CodeBlock text={read.raw} language="json" open={false} />;
  if (read.named.length === 0) return <p class="soft">{t("Without arguments")}</p>;
  return (
    <dl class="arguments">
      {read.named.map(([name, value]) => (
        <div key={name}>
          <dt>{exposed(name)}</dt>
          <dd>{exposed(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

/** The result of a tool. */
export function ToolResult({ text, name, denied = false }: { text: string; name: string | undefined; denied?: boolean }): VNode {
  const { text: shown, json } = pretty(text);
  return (
    <article class="message result" aria-label={t("Result of a tool")}>
      <Fold class="card" icon={denied ? "close" : "check"} title={title(denied ? t("Not applied:") : t("Result of"), titleOf(name))}>
        <div class="card-body">
          <CodeBlock text={shown} language={json ? "json" : ""} open={false} />
        </div>
      </Fold>
    </article>
  );
}
