import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { chats, exportChats, importChats, remove } from "../state/chats";
import { several, t } from "../words";
import { choose, fileName, save } from "./files";
import { useFocus } from "./focus";
import { count } from "./format";
import { attempt, say } from "./toasts";

/** Chats to a file and back, and away with them. */
export function Data(): VNode {
  const number = chats.value.length;
  const known = several(number, "{number} chat", "{number} chats", { number: count(number) });
  return (
    <>
      <p class="lead">{t("Your chats are kept in this browser. The server keeps none of them.")}</p>
      <div class="button-row">
        <button type="button" class="button" disabled={number === 0} onClick={() => void attempt(exportAll)}>
          <Icon name="download" />
          {t("Export all")}
        </button>
        <button type="button" class="button" onClick={() => void attempt(importFile)}>
          <Icon name="upload" />
          {t("Import…")}
        </button>
      </div>
      <p class="hint">{t("Files of this page and of llama-server’s can be imported. Chats that are here already are left as they are.")}</p>
      {number > 0 && <DeleteAll known={known} />}
    </>
  );
}

async function exportAll(): Promise<void> {
  save(await exportChats(), fileName(null, new Date()));
}

async function importFile(): Promise<void> {
  const [file] = await choose({ accept: ".json,.jsonl,.zip,application/json" });
  if (!file) return;
  const added = await importChats(file);
  say(several(added, "{number} chat was added.", "{number} chats were added.", { number: count(added) }));
}

function DeleteAll({ known }: { known: string }): VNode {
  const [asked, ask] = useState(false);
  const go = async () => {
    ask(false);
    const all = await exportChats();
    await Promise.all(chats.value.map((chat) => remove(chat.id)));
    say(t("Deleted: {known}.", { known }), {
      label: t("Undo"),
      run: async () => {
        await importChats(all);
      },
    });
  };
  if (asked) return <Confirm known={known} onDelete={() => void attempt(go)} onKeep={() => ask(false)} />;
  return (
    <button type="button" class="button danger" onClick={() => ask(true)}>
      <Icon name="trash" />
      {t("Delete all chats…")}
    </button>
  );
}

interface ConfirmProps {
  known: string;
  onDelete: () => void;
  onKeep: () => void;
}

function Confirm({ known, onDelete, onKeep }: ConfirmProps): VNode {
  const keep = useFocus<HTMLButtonElement>();
  return (
    <div class="confirm" role="group" aria-label={t("Delete all chats")}>
      <p>{t("Delete {known}? Running answers are stopped.", { known })}</p>
      <div class="button-row">
        <button type="button" class="button danger" onClick={onDelete}>
          {t("Delete them")}
        </button>
        <button type="button" class="button" ref={keep} onClick={onKeep}>
          {t("Keep them")}
        </button>
      </div>
    </div>
  );
}
