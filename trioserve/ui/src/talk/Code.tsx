// A block of code: its language, its text in colours, and a button that copies it.

import type { ComponentChildren, VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { Icon } from "../icon";
import { CopyButton } from "./CopyButton";
import { highlight } from "./highlight";
import type { Line } from "./highlightCode";
import { revealed } from "./links";
import { memo } from "./memo";
import { Painter, type Coloured } from "./painter";

interface Props {
  text: string;
  language: string;
  /** More of it may come. */
  open: boolean;
}

function Code({ text, language, open }: Props): VNode {
  const [wrapped, setWrapped] = useState(false);
  const shown = revealed(text);
  const lines = useColours(shown, language, open);
  return (
    <figure class={wrapped ? "code wrapped" : "code"}>
      <figcaption>
        <span class="language">{language || "text"}</span>
        <button
          type="button"
          class="icon-button"
          aria-pressed={wrapped}
          aria-label="Wrap long lines"
          title="Wrap long lines"
          onClick={() => setWrapped(!wrapped)}
        >
          <Icon name="wrap" />
        </button>
        <CopyButton text={text} label="Copy code" />
      </figcaption>
      <pre tabIndex={0} dir="ltr">
        <code>{lines}</code>
      </pre>
    </figure>
  );
}

/** A block of code. */
export const CodeBlock = memo(Code);

/** The code as it is shown: in colours as far as they are there, then plain. */
function useColours(code: string, language: string, open: boolean): ComponentChildren {
  const [coloured, setColoured] = useState<Coloured>({ code: "", lines: [] });
  const painter = useMemo(() => new Painter(setColoured, highlight), []);
  const drawn = useRef<Drawn>({ lines: [], nodes: [] });
  useEffect(() => painter.want(code, language, open), [painter, code, language, open]);
  useEffect(() => () => painter.end(), [painter]);
  if (coloured.code === "" || !code.startsWith(coloured.code)) return code;
  drawn.current = draw(coloured.lines, drawn.current);
  return [...drawn.current.nodes, code.slice(coloured.code.length)];
}

interface Drawn {
  lines: Line[];
  nodes: VNode[];
}

/** Lines that are as they were keep their nodes, so that nothing is done about them. */
function draw(lines: Line[], before: Drawn): Drawn {
  if (lines === before.lines) return before;
  const nodes = lines.map((line, index) => {
    const node = before.nodes[index];
    return node && isSame(line, before.lines[index] as Line) ? node : drawLine(line, index);
  });
  return { lines, nodes };
}

function isSame(one: Line, other: Line): boolean {
  return one.length === other.length && one.every(([kind, text], at) => other[at]?.[0] === kind && other[at]?.[1] === text);
}

function drawLine(line: Line, index: number): VNode {
  const pieces = line.map(([kind, text]) => (kind ? <span class={`hl-${kind}`}>{text}</span> : text));
  return (
    <span key={index}>
      {index > 0 && "\n"}
      {pieces}
    </span>
  );
}
