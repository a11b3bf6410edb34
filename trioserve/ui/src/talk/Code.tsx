// A block of code: its language, its text in colours, and a button that copies it.

import type { ComponentChildren, VNode } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

import { Icon, type IconName } from "../icon";
import { t } from "../words";
import { CopyButton } from "./CopyButton";
import { highlight } from "./highlight";
import type { Line, Piece } from "./highlightCode";
import { revealed } from "./links";
import { memo } from "./memo";
import { linesOf, same } from "./lines";
import { Painter, type Coloured } from "./painter";
import { Picture } from "./Picture";
import { pictureKind } from "./pictures";

interface Props {
  text: string;
  language: string;
  /** More of it may come. */
  open: boolean;
}

function Code({ text, language, open }: Props): VNode {
  const [wrapped, setWrapped] = useState(false);
  const [chosen, choose] = useState<boolean | null>(null);
  const [problem, setProblem] = useState("");
  const shown = revealed(text);
  const lines = useLines(shown, language, open);
  const kind = open ? null : pictureKind(language, text);
  // A page runs scripts: a person starts it.
  const pictured = kind !== null && (chosen ?? kind !== "html");
  return (
    <figure class={wrapped ? "code wrapped" : "code"}>
      <figcaption>
        <span class="language">{language || "text"}</span>
        {kind && (
          <Toggle icon={pictured ? "code" : "eye"} label={pictured ? t("Show code") : t("Preview")} onClick={() => choose(!pictured)} />
        )}
        {!pictured && (
          <Toggle icon="wrap" label={t("Wrap long lines")} pressed={wrapped} onClick={() => setWrapped(!wrapped)} />
        )}
        <CopyButton text={text} label={t("Copy code")} />
      </figcaption>
      {kind && problem && <p class="hint problem">{problem}</p>}
      {pictured ? (
        <Picture
          kind={kind}
          text={text}
          fail={(what) => {
            setProblem(what);
            choose(false);
          }}
        />
      ) : (
        <pre tabIndex={0} dir="ltr">
          <code>{grouped(lines)}</code>
        </pre>
      )}
    </figure>
  );
}

interface ToggleProps {
  icon: IconName;
  label: string;
  pressed?: boolean;
  onClick: () => void;
}

function Toggle({ icon, label, pressed, onClick }: ToggleProps): VNode {
  return (
    <button type="button" class="icon-button" aria-pressed={pressed} aria-label={label} title={label} onClick={onClick}>
      <Icon name={icon} />
    </button>
  );
}

/** A block of code. */
export const CodeBlock = memo(Code);

/** The lines of the code: in colours as far as they are there, then plain. */
function useLines(code: string, language: string, open: boolean): Line[] {
  const [coloured, setColoured] = useState<Coloured>({ code: "", lines: [] });
  const painter = useMemo(() => new Painter(setColoured, highlight), []);
  useEffect(() => painter.want(code, language, open), [painter, code, language, open]);
  useEffect(() => () => painter.end(), [painter]);
  return code.startsWith(coloured.code) ? linesOf(code, coloured) : linesOf(code, { code: "", lines: [] });
}

/** Lines that are laid out together: while code is written, only the last of them are laid out again. */
const TOGETHER = 24;

function grouped(lines: Line[]): VNode[] {
  const groups: VNode[] = [];
  for (let at = 0; at < lines.length; at += TOGETHER) {
    groups.push(<Lines key={at} lines={lines.slice(at, at + TOGETHER)} isLast={at + TOGETHER >= lines.length} />);
  }
  return groups;
}

interface LinesProps {
  lines: Line[];
  isLast: boolean;
}

const Lines = memo<LinesProps>(
  ({ lines, isLast }) => (
    <span class="lines">
      {lines.map((line, at) => [...line.map(drawn), isLast && at === lines.length - 1 ? "" : "\n"])}
    </span>
  ),
  (before, after) =>
    before.isLast === after.isLast &&
    before.lines.length === after.lines.length &&
    before.lines.every((line, at) => same(line, after.lines[at])),
);

function drawn([kind, text]: Piece): ComponentChildren {
  return kind ? <span class={`hl-${kind}`}>{text}</span> : text;
}
