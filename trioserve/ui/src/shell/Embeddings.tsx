import type { VNode } from "preact";
import { useId, useState } from "preact/hooks";

import { chosenModel } from "../state/choice";
import { embed, likeness } from "../state/embeddings";
import { t } from "../words";
import { modelName } from "./format";
import { attempt } from "./toasts";

/** The most texts that are compared. */
const MANY = 32;

/** The page of a model that only embeds: texts, and how alike they are. */
export function Embeddings(): VNode {
  const id = useId();
  const [text, setText] = useState("");
  const [found, setFound] = useState<{ lines: string[]; vectors: Float32Array[] } | null>(null);
  const [busy, setBusy] = useState(false);
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean).slice(0, MANY);
  const compare = (event: Event) => {
    event.preventDefault();
    void attempt(async () => {
      setBusy(true);
      try {
        setFound({ lines, vectors: await embed(lines, chosenModel.peek()) });
      } finally {
        setBusy(false);
      }
    });
  };
  return (
    <div class="embeddings">
      <h1>{modelName(chosenModel.value)}</h1>
      <p>{t("This model turns texts into vectors, and writes none. Compare some texts, one a line:")}</p>
      <form onSubmit={compare}>
        <label class="visually-hidden" for={id}>
          {t("Texts")}
        </label>
        <textarea id={id} class="field" rows={6} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        <button type="submit" class="button primary" disabled={busy || lines.length < 2}>
          {busy ? t("Comparing…") : t("Compare")}
        </button>
      </form>
      {found && <Likeness {...found} />}
    </div>
  );
}

/** A table of how alike each two texts are; the more, the stronger its color. */
function Likeness({ lines, vectors }: { lines: string[]; vectors: Float32Array[] }): VNode {
  return (
    <div class="table" role="region" aria-label={t("How alike the texts are")} tabIndex={0}>
      <table class="likeness">
        <caption class="hint">{t("{number} dimensions; 1 is the same, 0 unrelated", { number: vectors[0]!.length })}</caption>
        <tbody>
          {lines.map((line, row) => (
            <tr key={row}>
              <th scope="row" dir="auto" title={line}>
                {line}
              </th>
              {vectors.map((other, column) => {
                const share = likeness(vectors[row]!, other);
                return (
                  <td key={column} title={lines[column]} style={{ "--share": `${Math.round(Math.max(0, share) * 60)}%` }}>
                    {share.toFixed(2)}
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
