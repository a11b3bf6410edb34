import { signal, useComputed } from "@preact/signals";
import type { VNode } from "preact";

import { duplicate, exportChats, exportMarkdown, pin, remove, rename, type Found } from "../state/chats";
import { runs } from "../state/runs";
import type { Chat } from "../types";
import { several, t } from "../words";
import { linkTo } from "./address";
import { fileName, save } from "./files";
import { useFocus } from "./focus";
import { count, quoted } from "./format";
import { goToMessage } from "./jump";
import { Menu } from "./Popover";
import { goTo } from "./route";
import { chosen, toggle } from "./selection";
import { attempt, say } from "./toasts";
import { uncover } from "./view";

/** The chat whose name is being written. */
const renamed = signal<string | null>(null);

interface RowProps {
  chat: Chat;
  current: boolean;
  /** The place in it of the words of a search. */
  found?: Found;
}

/** A chat in the list: a link, and what can be done with it. */
export function ChatRow({ chat, current, found }: RowProps): VNode {
  const renaming = useComputed(() => renamed.value === chat.id);
  const phase = useComputed(() => runs.value.get(chat.id)?.phase);
  if (renaming.value) {
    return (
      <li class="chat-row">
        <NameField chat={chat} />
      </li>
    );
  }
  const begin = () => (renamed.value = chat.id);
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "F2") begin();
    else if (event.key === "Delete") void attempt(() => drop(chat));
    else return;
    event.preventDefault();
  };
  const title = chat.title || t("Untitled");
  if (chosen.value) {
    return (
      <li class="chat-row">
        <label class="chat-choice">
          <input type="checkbox" checked={chosen.value.has(chat.id)} onChange={() => toggle(chat.id)} />
          <span class="chat-title" dir="auto">
            {title}
          </span>
        </label>
      </li>
    );
  }
  return (
    <li class={current ? "chat-row current" : "chat-row"}>
      <a
        class="chat-link"
        href={linkTo(chat.id)}
        title={title}
        aria-current={current ? "page" : undefined}
        onClick={uncover}
        onDblClick={begin}
        onKeyDown={onKey}
      >
        {phase.value && (
          <span
            class={phase.value === "asking" ? "pulse asking" : "pulse"}
            role="img"
            aria-label={phase.value === "asking" ? t("Waits for your approval") : t("Being answered")}
          />
        )}
        <span class="chat-title" dir="auto">
          {title}
        </span>
      </a>
      <Menu
        label={t("More about {title}", { title })}
        entries={[
          { label: chat.pinned ? t("Unpin") : t("Pin"), icon: "pin", run: () => void attempt(() => pin(chat.id, !chat.pinned)) },
          { label: t("Rename"), icon: "edit", run: begin },
          { label: t("Duplicate"), icon: "copy", run: () => void attempt(async () => goTo(await duplicate(chat.id))) },
          { label: t("Export"), icon: "download", run: () => void attempt(() => download(chat)) },
          { label: t("Export as Markdown"), icon: "file", run: () => void attempt(() => downloadText(chat)) },
          { label: t("Select"), icon: "check", run: () => toggle(chat.id) },
          { label: t("Delete"), icon: "trash", danger: true, run: () => void attempt(() => drop(chat)) },
        ]}
      />
      {found && <Hits found={found} />}
    </li>
  );
}

/** The places where the words of a search occur, each with the way to it. */
function Hits({ found: { chat, count: number, hits } }: { found: Found }): VNode | null {
  if (number === 0) return null;
  return (
    <div class="hits">
      {hits.map(({ message, before, found, after }) => (
        <button key={message} type="button" class="hit" dir="auto" onClick={() => goToMessage(chat.id, message)}>
          {before}
          <mark>{found}</mark>
          {after}
        </button>
      ))}
      <span class="hint">{several(number, "{number} match", "{number} matches", { number: count(number) })}</span>
    </div>
  );
}

/** Put the focus on a chat of the list, by how far it is from the given one: itself, or the one below. */
function focusLink(chat: string, by: 0 | 1): void {
  const links = [...document.querySelectorAll<HTMLElement>(".chat-link")];
  const at = links.findIndex((link) => link.getAttribute("href") === linkTo(chat));
  (links[at + by] ?? links[at - 1])?.focus();
}

function NameField({ chat }: { chat: Chat }): VNode {
  const input = useFocus<HTMLInputElement>();
  const end = (title: string) => {
    if (renamed.value !== chat.id) return; // Escape has ended it, and the field loses the focus
    renamed.value = null;
    if (title.trim() && title !== chat.title) void attempt(() => rename(chat.id, title.trim()));
  };
  return (
    <input
      ref={input}
      class="field chat-name"
      aria-label={t("Name of the chat")}
      maxLength={200}
      value={chat.title}
      onFocus={(event) => event.currentTarget.select()}
      onBlur={(event) => end(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (event.key === "Enter") end(event.currentTarget.value);
        else if (event.key === "Escape") renamed.value = null;
        else return;
        event.preventDefault();
        requestAnimationFrame(() => focusLink(chat.id, 0));
      }}
    />
  );
}

async function download(chat: Chat): Promise<void> {
  save(await exportChats([chat.id]), fileName(chat.title, new Date()));
}

async function downloadText(chat: Chat): Promise<void> {
  save(await exportMarkdown(chat.id), fileName(chat.title, new Date(), "md"));
}

async function drop(chat: Chat): Promise<void> {
  focusLink(chat.id, 1);
  const undo = await remove(chat.id);
  say(t("{title} was deleted.", { title: quoted(chat.title || t("Untitled")) }), { label: t("Undo"), run: undo });
}
