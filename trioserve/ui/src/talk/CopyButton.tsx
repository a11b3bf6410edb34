// Copying to the clipboard.

import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Icon } from "../icon";
import { t } from "../words";

const SHOWN_MS = 1600;

/** Copy a text; false: the browser does not let the page do so. */
export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // an address without https has no clipboard
  }
}

function copySelected(text: string): boolean {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "visually-hidden";
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  return copied;
}

/** A button that copies a text and says that it did. */
export function CopyButton({ text, label }: { text: string; label: string }): VNode {
  const [result, setResult] = useState<"" | "Copied" | "Not copied">("");
  useEffect(() => {
    if (!result) return undefined;
    const timer = setTimeout(() => setResult(""), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [result]);
  const copy = async () => setResult((await copyText(text)) ? "Copied" : "Not copied");
  return (
    <button type="button" class="icon-button" aria-label={label} title={result ? t(result) : label} onClick={copy}>
      <Icon name={result === "Copied" ? "check" : result ? "alert" : "copy"} />
      <span class="visually-hidden" role="status">
        {result && t(result)}
      </span>
    </button>
  );
}
