// What can be done with a message, and the way to its other versions.

import type { VNode } from "preact";
import { useRef } from "preact/hooks";

import { Icon, type IconName } from "../icon";
import { attempt, say } from "../shell/toasts";
import { continueAnswer, regenerate, removeMessage, showBranch } from "../state/talk";
import type { Message } from "../types";
import { t } from "../words";
import { CopyButton } from "./CopyButton";
import { canContinue, problem } from "./problems";

interface Props {
  message: Message;
  index: number | undefined;
  branches: string[] | undefined;
  last: boolean;
  edit: () => void;
}

/** The row of buttons under a message. */
export function Actions({ message, index, branches, last, edit }: Props): VNode {
  const answer = message.role === "assistant";
  return (
    <div class={last ? "actions shown" : "actions"}>
      {branches && index !== undefined && <BranchSwitch ids={branches} index={index} />}
      {message.content && <CopyButton text={message.content} label={t("Copy")} />}
      <Action icon="edit" label={t("Edit")} class="edit-button" act={edit} />
      {answer && <Action icon="refresh" label={t("Regenerate")} act={() => regenerate(message.id)} />}
      {!answer && last && <Action icon="refresh" label={t("Answer")} act={() => regenerate(message.id)} />}
      {answer && last && canContinue(message) && !problem(message) && (
        <Action icon="continue" label={t("Continue")} act={() => continueAnswer(message.id)} />
      )}
      <Action icon="trash" label={last ? t("Delete") : t("Delete this and what follows")} act={() => remove(message.id)} />
    </div>
  );
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

function BranchSwitch({ ids, index }: { ids: string[]; index: number }): VNode {
  return (
    <div class="branches" role="group" aria-label={t("Versions")}>
      <Turn icon="chevron-left" label={t("Previous version")} to={ids[index - 1]} />
      <span>
        {index + 1}/{ids.length}
      </span>
      <Turn icon="chevron-right" label={t("Next version")} to={ids[index + 1]} />
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
