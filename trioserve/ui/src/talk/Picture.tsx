// A block of code as a picture (a drawing or a diagram), or as a page in a separate frame.

import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { useObjectUrl } from "../shell/objectUrl";
import { isDark } from "../shell/media";
import { t } from "../words";
import { svgFile, type PictureKind } from "./pictures";
import { drawDiagram, fill } from "./sandbox";

interface Props {
  text: string;
  /** Called with what is wrong with it, for people. */
  fail: (problem: string) => void;
}

/** The picture of a text. */
export function Picture({ kind, ...props }: Props & { kind: PictureKind }): VNode {
  switch (kind) {
    case "svg":
      return <Drawing {...props} name={t("Drawing")} />;
    case "mermaid":
      return <Diagram {...props} />;
    case "html":
      return <Page text={props.text} />;
  }
}

function Drawing({ text, name, dark = false, fail }: Props & { name: string; dark?: boolean }): VNode {
  const file = useMemo(() => svgFile(text), [text]);
  const url = useObjectUrl(file);
  const failed = () => fail(t("This is not a drawing that the browser can show."));
  return <div class={dark ? "sheet dark" : "sheet"}>{url && <img src={url} alt={name} onError={failed} />}</div>;
}

function Diagram({ text, fail }: Props): VNode {
  const [svg, setSvg] = useState<string | null>(null);
  const dark = isDark();
  useEffect(() => {
    let wanted = true;
    drawDiagram(text, dark).then(
      (drawn) => wanted && setSvg(drawn),
      (error: Error) => wanted && fail(t("The diagram cannot be drawn. {message}", { message: error.message })),
    );
    return () => void (wanted = false);
  }, [text, dark]);
  return svg === null ? <p class="sheet hint">{t("Drawing the diagram…")}</p> : <Drawing text={svg} name={t("Diagram")} dark={dark} fail={fail} />;
}

/** A page in a sandboxed frame. */
function Page({ text }: { text: string }): VNode {
  const frame = useRef<HTMLIFrameElement>(null);
  useLayoutEffect(() => fill(frame.current!, text), [text]);
  return <iframe ref={frame} class="page-preview" title={t("Preview of the page")} />;
}
