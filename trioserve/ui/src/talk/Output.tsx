// The output of a tool, while it runs and at its end.

import type { VNode } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { count } from "../shell/format";
import { several, t } from "../words";
import { CodeBlock } from "./Code";
import { CopyButton } from "./CopyButton";
import { revealed } from "./links";
import { pretty } from "./toolCalls";
import { errorIn, partOf, screenText } from "./toolText";

/** The shown part of an output that grows. */
const TAIL = { lines: 200, characters: 16_384 };

/** The end of what a tool that runs has written. */
export function Output({ text }: { text: string }): VNode {
  const place = useRef<HTMLPreElement>(null);
  const shown = useMemo(() => revealed(partOf(screenText(text), TAIL, "end").text), [text]);
  useLayoutEffect(() => {
    if (place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [shown]);
  return (
    <pre class="output" dir="ltr" tabIndex={0} aria-label={t("Output so far")} ref={place}>
      {shown}
    </pre>
  );
}

/** The shown part of a result, at first and at most. */
const FEW = { lines: 60, characters: 8_192 };
const MANY = { lines: 2_000, characters: 131_072 };

/** The result of a call. */
export function Result({ text, failed }: { text: string; failed: boolean }): VNode {
  const [most, setMost] = useState(FEW);
  const { whole, json } = useMemo(() => readable(text), [text]);
  const part = useMemo(() => partOf(whole, most), [whole, most]);
  const error = failed ? errorIn(text) : null;
  if (error !== null) return <p class="call-error" dir="auto">{revealed(screenText(error.slice(0, FEW.characters)))}</p>;
  const isWhole = part.text.length === whole.length;
  return (
    <>
      <CodeBlock text={part.text} language={json ? "json" : ""} open={false} />
      {!isWhole && (
        <p class="more">
          {several(part.all, "{shown} of {all} line", "{shown} of {all} lines", { shown: count(part.lines), all: count(part.all) })}
          {most === FEW && (
            <button type="button" class="button" onClick={() => setMost(MANY)}>
              {t("Show more")}
            </button>
          )}
          <CopyButton text={text} label={t("Copy all of it")} />
        </p>
      )}
    </>
  );
}

function readable(text: string): { whole: string; json: boolean } {
  const { text: whole, json } = pretty(text);
  return { whole: screenText(whole), json };
}
