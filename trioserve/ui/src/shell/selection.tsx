import { signal } from "@preact/signals";
import type { VNode } from "preact";

import { chats, exportChats, remove } from "../state/chats";
import { several, t } from "../words";
import { fileName, save } from "./files";
import { count } from "./format";
import { attempt, say } from "./toasts";

/** The chats that are chosen, to do something with all of them; null: none are being chosen. */
export const chosen = signal<ReadonlySet<string> | null>(null);

/** Choose a chat, or no longer. */
export function toggle(chat: string): void {
  const next = new Set(chosen.peek());
  if (!next.delete(chat)) next.add(chat);
  chosen.value = next;
}

/** The actions for the chosen chats. */
export function SelectionBar(): VNode | null {
  if (chosen.value === null) return null;
  const all = chats.value.map(({ id }) => id);
  const ids = all.filter((id) => chosen.value?.has(id));
  const areAll = ids.length === all.length;
  return (
    <div class="selection" role="group" aria-label={t("Selected chats")}>
      <p role="status">{several(ids.length, "{number} chat selected", "{number} chats selected", { number: count(ids.length) })}</p>
      <div class="button-row">
        <button type="button" class="button" onClick={() => (chosen.value = new Set(areAll ? [] : all))}>
          {areAll ? t("None") : t("All")}
        </button>
        <button type="button" class="button" disabled={ids.length === 0} onClick={() => void attempt(() => download(ids))}>
          {t("Export")}
        </button>
        <button type="button" class="button danger" disabled={ids.length === 0} onClick={() => void attempt(() => drop(ids))}>
          {t("Delete")}
        </button>
        <button type="button" class="button" onClick={() => (chosen.value = null)}>
          {t("Done")}
        </button>
      </div>
    </div>
  );
}

async function download(ids: string[]): Promise<void> {
  save(await exportChats(ids), fileName(null, new Date()));
}

async function drop(ids: string[]): Promise<void> {
  chosen.value = null;
  const undos = await Promise.all(ids.map(remove));
  const undo = async () => {
    for (const each of undos) await each();
  };
  say(several(ids.length, "{number} chat was deleted.", "{number} chats were deleted.", { number: count(ids.length) }), {
    label: t("Undo"), run: undo,
  });
}
