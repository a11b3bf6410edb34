// Calls of tools, and what the tools said.

import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon, type IconName } from "../icon";
import type { ToolCall } from "../types";
import { CodeBlock } from "./Code";
import { pretty, readArguments } from "./toolCalls";

/** What the model asks tools to do. */
export function ToolCalls({ calls, writing }: { calls: ToolCall[]; writing: boolean }): VNode {
  return (
    <>
      {calls.map((call, index) => (
        <Fold key={call.id || index} icon="tool" title={call.name || "a tool"} said="Calls" open={writing}>
          <CallArguments written={call.arguments} />
        </Fold>
      ))}
    </>
  );
}

function CallArguments({ written }: { written: string }): VNode {
  const read = readArguments(written);
  if ("raw" in read) return <CodeBlock text={read.raw} language="json" open={false} />;
  if (read.named.length === 0) return <p class="soft">Without arguments</p>;
  return (
    <dl class="arguments">
      {read.named.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** What a tool gave back. */
export function ToolResult({ text, name }: { text: string; name: string | undefined }): VNode {
  const { text: shown, json } = pretty(text);
  return (
    <article class="message result" aria-label="Result of a tool">
      <Fold icon="check" title={name || "a tool"} said="Result of">
        <CodeBlock text={shown} language={json ? "json" : ""} open={false} />
      </Fold>
    </article>
  );
}

interface FoldProps {
  icon: IconName;
  said: string;
  title: string;
  /** Unfolded until somebody folds it. */
  open?: boolean;
  children: ComponentChildren;
}

/** A line that unfolds; what is folded is not drawn. */
export function Fold({ icon, said, title, open: atFirst = false, children }: FoldProps): VNode {
  const [chosen, choose] = useState<boolean | null>(null);
  const open = chosen ?? atFirst;
  return (
    <section class="folded-card">
      <button type="button" class="fold" aria-expanded={open} onClick={() => choose(!open)}>
        <Icon name={icon} />
        <span>
          {said} <bdi class="name">{title}</bdi>
        </span>
        <Icon name="chevron-down" />
      </button>
      {open && <div class="folded-body">{children}</div>}
    </section>
  );
}
