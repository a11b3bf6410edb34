// GitHub's alerts: quotes that begin with a kind, such as [!NOTE].

import type { IconName } from "../icon";
import type { Text } from "../words";
import type { Token, Tokens } from "./lexer";

const KINDS = {
  note: { title: "Note", icon: "info" },
  tip: { title: "Tip", icon: "bulb" },
  important: { title: "Important", icon: "alert" },
  warning: { title: "Warning", icon: "alert" },
  caution: { title: "Caution", icon: "alert" },
} as const satisfies Record<string, { title: Text; icon: IconName }>;

export interface Alert {
  kind: keyof typeof KINDS;
  title: Text;
  icon: IconName;
  /** Its content. */
  tokens: Token[];
}

const MARK = /^\[!(note|tip|important|warning|caution)\][ \t]*(?:\n|$)/i;

/** A quote as an alert; null for other quotes. */
export function alertIn({ tokens }: Tokens.Blockquote): Alert | null {
  const [first, ...rest] = tokens;
  const [lead, ...more] = first?.type === "paragraph" ? (first.tokens ?? []) : [];
  const [mark, name] = (lead?.type === "text" && MARK.exec(lead.raw)) || [];
  if (!first || !lead || !mark || !name || (lead.raw === mark && more.length > 0)) return null;
  const kind = name.toLowerCase() as Alert["kind"];
  const said = { ...lead, raw: lead.raw.slice(mark.length), text: (lead as Tokens.Text).text.slice(mark.length) };
  const begun = said.raw ? [{ ...first, tokens: [said, ...more] } as Token] : [];
  return { kind, ...KINDS[kind], tokens: [...begun, ...rest] };
}
