// The files that go with a message.

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { bytes } from "../shell/format";
import { useObjectUrl } from "../shell/objectUrl";
import { save } from "../shell/files";
import { kindOf } from "../state/media";
import type { Attachment } from "../types";
import { t } from "../words";
import { CodeBlock } from "./Code";
import { withoutDirections } from "./links";

interface Props {
  list: Attachment[];
  /** Removes a file, if files can be removed here. */
  remove?: (id: string) => void;
}

/** Text files by name, where a click shows what is in one; PDFs, which it saves; pictures; and players of the others. */
export function Attachments({ list, remove }: Props): VNode | null {
  const [shown, show] = useState<string | null>(null);
  const toggle = (id: string) => show(id === shown ? null : id);
  const file = list.find((one) => one.id === shown && !one.data);
  if (list.length === 0) return null;
  return (
    <div class="attachments">
      <ul aria-label={t("Attached files")}>
        {list.map((one) => (
          <li key={one.id}>
            {one.data ? (
              <Media file={one} large={one.id === shown} toggle={() => toggle(one.id)} />
            ) : (
              <FileButton file={one} expanded={one.id === shown} onClick={() => toggle(one.id)} />
            )}
            {remove && (
              <button
                type="button"
                class="icon-button"
                aria-label={t("Remove {name}", { name: one.name })}
                title={t("Remove")}
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

interface FileButtonProps {
  file: Attachment;
  expanded?: boolean;
  title?: string;
  onClick: () => void;
}

function FileButton({ file, expanded, title, onClick }: FileButtonProps): VNode {
  return (
    <button type="button" class="button file" aria-expanded={expanded} title={title} onClick={onClick}>
      <Icon name="file" />
      <bdi class="name">{withoutDirections(file.name)}</bdi>
      <span class="soft">{bytes(file.size)}</span>
    </button>
  );
}

interface MediaProps {
  file: Attachment;
  large: boolean;
  toggle: () => void;
}

/** A picture, which a click enlarges, or a player. */
function Media({ file, large, toggle }: MediaProps): VNode {
  const url = useObjectUrl(file.data);
  const name = withoutDirections(file.name);
  switch (kindOf(file.type)) {
    case "audio":
      return <audio class="media" controls src={url} aria-label={name} title={name} />;
    case "video":
      return <video class="media" controls src={url} aria-label={name} title={name} />;
    case null:
      return <FileButton file={file} title={t("Save")} onClick={() => save(file.data!, file.name)} />;
    case "image":
      return (
        <button type="button" class="picture" aria-expanded={large} title={name} onClick={toggle}>
          <img src={url} alt={name} />
        </button>
      );
  }
}

/** The language of a file, which the highlighter knows by the ending of its name. */
function ending(name: string): string {
  return /\.(\w{1,10})$/.exec(name)?.[1]?.toLowerCase() ?? "";
}
