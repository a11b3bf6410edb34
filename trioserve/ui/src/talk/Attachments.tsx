// The files that go with a message.

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { bytes } from "../shell/format";
import type { Attachment } from "../types";
import { CodeBlock } from "./Code";
import { withoutDirections } from "./links";

interface Props {
  list: Attachment[];
  /** Where files can be taken away. */
  remove?: (id: string) => void;
}

/** Files by name; a click shows what is in one. */
export function Attachments({ list, remove }: Props): VNode | null {
  const [shown, show] = useState<string | null>(null);
  const file = list.find((one) => one.id === shown);
  if (list.length === 0) return null;
  return (
    <div class="attachments">
      <ul aria-label="Attached files">
        {list.map((one) => (
          <li key={one.id}>
            <button
              type="button"
              class="button file"
              aria-expanded={one.id === shown}
              onClick={() => show(one.id === shown ? null : one.id)}
            >
              <Icon name="file" />
              <bdi class="name">{withoutDirections(one.name)}</bdi>
              <span class="soft">{bytes(one.size)}</span>
            </button>
            {remove && (
              <button
                type="button"
                class="icon-button"
                aria-label={`Remove ${one.name}`}
                title="Remove"
                onClick={() => remove(one.id)}
              >
                <Icon name="close" />
              </button>
            )}
          </li>
        ))}
      </ul>
      {file && <CodeBlock text={file.text} language={ending(file.name)} open={false} />}
    </div>
  );
}

/** The language of a file, which the highlighter knows by the ending of its name. */
function ending(name: string): string {
  return /\.(\w{1,10})$/.exec(name)?.[1]?.toLowerCase() ?? "";
}
