// What can be done with a message, and the way to its other versions.

import type { VNode } from "preact";

import { Icon, type IconName } from "../icon";
import { attempt, say } from "../shell/toasts";
import { continueAnswer, regenerate, removeMessage, showBranch } from "../state/talk";
import type { Message } from "../types";
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
      {message.content && <CopyButton text={message.content} label="Copy" />}
      <Action icon="edit" label="Edit" act={edit} />
      {answer && <Action icon="refresh" label="Answer again" act={() => regenerate(message.id)} />}
      {answer && last && canContinue(message) && !problem(message) && (
        <Action icon="play" label="Continue" act={() => continueAnswer(message.id)} />
      )}
      <Action icon="trash" label={last ? "Delete" : "Delete this and what follows"} act={() => remove(message.id)} />
    </div>
  );
}

async function remove(message: string): Promise<void> {
  const undo = await removeMessage(message);
  say("Deleted.", { label: "Undo", run: undo });
}

function Action({ icon, label, act }: { icon: IconName; label: string; act: () => unknown }): VNode {
  return (
    <button type="button" class="icon-button" aria-label={label} title={label} onClick={() => void attempt(act)}>
      <Icon name={icon} />
    </button>
  );
}

function BranchSwitch({ ids, index }: { ids: string[]; index: number }): VNode {
  const go = (to: number) => () => void attempt(() => showBranch(ids[to] as string));
  return (
    <div class="branches" role="group" aria-label="Versions">
      <button
        type="button"
        class="icon-button"
        aria-label="Previous version"
        title="Previous version"
        disabled={index === 0}
        onClick={go(index - 1)}
      >
        <Icon name="chevron-left" />
      </button>
      <span aria-label={`Version ${index + 1} of ${ids.length}`}>
        {index + 1}/{ids.length}
      </span>
      <button
        type="button"
        class="icon-button"
        aria-label="Next version"
        title="Next version"
        disabled={index === ids.length - 1}
        onClick={go(index + 1)}
      >
        <Icon name="chevron-right" />
      </button>
    </div>
  );
}
