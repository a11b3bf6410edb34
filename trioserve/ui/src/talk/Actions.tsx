// The actions for a message, and the way to its other versions.

import type { VNode } from "preact";
import { useRef } from "preact/hooks";

import { Icon, type IconName } from "../icon";
import { modelName } from "../shell/format";
import { Menu } from "../shell/Popover";
import { attempt, say } from "../shell/toasts";
import { models } from "../state/models";
import { readAloud } from "../state/reading";
import { continueAnswer, regenerate, removeMessage, showBranch } from "../state/talk";
import { canRead, serverSpeaks } from "../state/voices";
import type { Message } from "../types";
import { t } from "../words";
import { CopyButton } from "./CopyButton";
import { canContinue, problem } from "./problems";
import { readOrStop } from "./reading";

interface Props {
  message: Message;
  index: number | undefined;
  branches: string[] | undefined;
  last: boolean;
  edit: () => void;
  /** True while another version is shown beside this one; `compare` toggles it. */
  compared?: boolean;
  compare?: () => void;
}

/** The row of buttons under a message. */
export function Actions({ message, index, branches, last, edit, compared = false, compare }: Props): VNode {
  const answer = message.role === "assistant";
  const read = answer && message.content && canRead() && <ReadButton key="read" id={message.id} />;
  if (message.state === "writing") return <div class="actions shown">{read}</div>;
  return (
    <div class={last || (answer && readAloud.value === message.id) ? "actions shown" : "actions"}>
      {branches && index !== undefined && <BranchSwitch ids={branches} index={index} compared={compared} compare={compare} />}
      {message.content && <CopyButton text={message.content} label={t("Copy")} />}
      {read}
      <Action icon="edit" label={t("Edit")} class="edit-button" act={edit} />
      {answer && <Action icon="refresh" label={t("Regenerate")} act={() => regenerate(message.id)} />}
      {answer && models.value.length > 1 && <OtherModel message={message} />}
      {!answer && last && <Action icon="refresh" label={t("Answer")} act={() => regenerate(message.id)} />}
      {answer && last && canContinue(message) && !problem(message) && (
        <Action icon="continue" label={t("Continue")} act={() => continueAnswer(message.id)} />
      )}
      <Action icon="trash" label={last ? t("Delete") : t("Delete this and what follows")} act={() => remove(message.id)} />
    </div>
  );
}

/** Has another model answer: the versions can be compared. */
function OtherModel({ message: { id, model } }: { message: Message }): VNode {
  const others = models.value.filter((one) => one.id !== model && !one.aliases.includes(model));
  const entries = others.map((one) => ({ label: modelName(one.id), icon: "refresh" as const, run: () => void attempt(() => regenerate(id, one.id)) }));
  return <Menu icon="plug" label={t("Answer with another model")} entries={entries} />;
}

/** Reads an answer aloud, also while it is written. */
function ReadButton({ id }: { id: string }): VNode {
  const isRead = readAloud.value === id;
  const begins = serverSpeaks() ? t("Read aloud") : t("Read aloud, with the voice of the browser");
  return <Action icon={isRead ? "stop" : "speaker"} label={isRead ? t("Stop reading") : begins} act={() => readOrStop(id)} />;
}

async function remove(message: string): Promise<void> {
  const undo = await removeMessage(message);
  say(t("Deleted."), { label: t("Undo"), run: undo });
}

interface ActionProps {
  icon: IconName;
  label: string;
  class?: string;
  act: () => unknown;
}

function Action({ icon, label, class: name = "", act }: ActionProps): VNode {
  return (
    <button type="button" class={`icon-button ${name}`} aria-label={label} title={label} onClick={() => void attempt(act)}>
      <Icon name={icon} />
    </button>
  );
}

interface BranchProps {
  ids: string[];
  index: number;
  compared: boolean;
  compare: (() => void) | undefined;
}

function BranchSwitch({ ids, index, compared, compare }: BranchProps): VNode {
  return (
    <div class="branches" role="group" aria-label={t("Versions")}>
      <Turn icon="chevron-left" label={t("Previous version")} to={ids[index - 1]} />
      <span>
        {index + 1}/{ids.length}
      </span>
      <Turn icon="chevron-right" label={t("Next version")} to={ids[index + 1]} />
      {compare && (
        <button
          type="button"
          class="icon-button"
          aria-label={t("Compare with another version")}
          title={t("Compare with another version")}
          aria-pressed={compared}
          onClick={compare}
        >
          <Icon name="columns" />
        </button>
      )}
    </div>
  );
}

/** A button that stays where it is, also at the last version, so that it can be pressed again. */
function Turn({ icon, label, to }: { icon: IconName; label: string; to: string | undefined }): VNode {
  const button = useRef<HTMLButtonElement>(null);
  const turn = async (id: string) => {
    const place = () => button.current?.getBoundingClientRect().top ?? 0;
    const before = place();
    await showBranch(id);
    requestAnimationFrame(() => button.current?.closest(".talk-scroll")?.scrollBy(0, place() - before));
  };
  return (
    <button
      ref={button}
      type="button"
      class="icon-button"
      aria-label={label}
      title={label}
      aria-disabled={to === undefined}
      onClick={() => to !== undefined && void attempt(() => turn(to))}
    >
      <Icon name={icon} />
    </button>
  );
}
