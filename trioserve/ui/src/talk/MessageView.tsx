// A message: what was written, and what can be done with it.

import type { ReadonlySignal } from "@preact/signals";
import type { ComponentChildren, RefObject, VNode } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

import { modelName } from "../shell/format";
import { settings } from "../state/settings";
import { versionOf } from "../state/talk";
import type { Message } from "../types";
import { t } from "../words";
import { Actions } from "./Actions";
import { Attachments } from "./Attachments";
import { Steps } from "./Calls";
import { EditForm } from "./EditForm";
import { Markdown } from "./Markdown";
import { memo } from "./memo";
import { Odds } from "./Odds";
import { Parts } from "./Parts";
import { PageCalls } from "./PageCalls";
import { Problem } from "./Problem";
import { Reasoning } from "./Reasoning";
import { StatsLine } from "./StatsLine";
import { System } from "./System";
import { ToolCalls, ToolResult } from "./Tools";

export interface MessageProps {
  message: Message;
  /** The message while it is written. */
  live: ReadonlySignal<Message> | undefined;
  /** Its index among its siblings, and all of them. */
  index: number | undefined;
  branches: string[] | undefined;
  /** It is the last one of the conversation. */
  last: boolean;
  /** Of a tool's result: the tool. */
  tool: string | undefined;
}

function View(properties: MessageProps): VNode {
  const message = properties.live?.value ?? properties.message;
  switch (message.role) {
    case "user":
      return <UserMessage {...properties} message={message} />;
    case "assistant":
      return <Answer {...properties} message={message} />;
    case "tool":
      return <ToolResult text={message.content} name={properties.tool} denied={message.state === "stopped"} />;
    case "system":
      return <System text={message.content} />;
  }
}

/** A message; it is drawn again only when something of it changes. */
export const MessageView = memo(View);

function UserMessage(properties: MessageProps): VNode {
  const { message } = properties;
  const { place, editing, edit, close } = useEditing();
  return (
    <article class="message user" aria-label={t("You")} data-message={message.id} ref={place}>
      {editing ? (
        <EditForm message={message} close={close} />
      ) : (
        <>
          <Attachments list={message.attachments} />
          {message.content && <Bubble text={message.content} />}
          {message.parts && <Parts parts={message.parts} />}
        </>
      )}
      {!editing && <Actions {...properties} edit={edit} />}
    </article>
  );
}

interface Editing {
  place: RefObject<HTMLElement | null>;
  editing: boolean;
  edit: () => void;
  close: () => void;
}

/** True while a message is being edited. At the end the focus goes back to the button that began it. */
function useEditing(): Editing {
  const place = useRef<HTMLElement>(null);
  const [editing, setEditing] = useState(false);
  const before = useRef(false);
  useLayoutEffect(() => {
    if (before.current && !editing) place.current?.querySelector<HTMLElement>(".edit-button")?.focus();
    before.current = editing;
  }, [editing]);
  return { place, editing, edit: () => setEditing(true), close: () => setEditing(false) };
}

/** Stands where the answer will; what the server does is said above the composer. */
function Waiting(): VNode {
  return (
    <p class="waiting" aria-hidden="true">
      <span />
      <span />
      <span />
    </p>
  );
}

/** More than this is folded. */
const LONG = 1200;
const LINES = 16;

/** A person's message, as it was written. */
function Bubble({ text }: { text: string }): VNode {
  const long = text.length > LONG || text.split("\n", LINES + 1).length > LINES;
  const [whole, setWhole] = useState(false);
  return (
    <div class="bubble">
      <div class="said" dir="auto">
        {long && !whole ? beginning(text) : text}
      </div>
      {long && (
        <button type="button" class="fold" aria-expanded={whole} onClick={() => setWhole(!whole)}>
          {whole ? t("Show less") : t("Show all")}
        </button>
      )}
    </div>
  );
}

function beginning(text: string): string {
  return `${text.split("\n", LINES).join("\n").slice(0, LONG)}…`;
}

function Answer(properties: MessageProps): VNode {
  const { message } = properties;
  const { place, editing, edit, close } = useEditing();
  const writing = message.state === "writing";
  // One that only calls tools continues after their results.
  const passing = !properties.last && !properties.branches && message.toolCalls.length > 0 && !message.content;
  const [compared, compare] = useState(false);
  const { branches, index = 0 } = properties;
  const beside = compared && branches ? versionOf(branches[index > 0 ? index - 1 : 1]!) : undefined;
  const speaking = message.content !== "" || message.toolCalls.length > 0;
  return (
    <article class="message answer" aria-label={t("Answer")} data-message={message.id} aria-busy={writing} ref={place}>
      {message.steps && <Steps message={message} />}
      {message.reasoning && <Reasoning text={message.reasoning} writing={writing && !speaking} />}
      {editing ? (
        <EditForm message={message} close={close} />
      ) : (
        <Versions beside={beside} model={message.model}>
          {message.content && <Markdown text={message.content} writing={writing} />}
        </Versions>
      )}
      {message.toolCalls.length > 0 && <ToolCalls calls={message.toolCalls} writing={writing} />}
      {properties.last && !writing && message.toolCalls.length > 0 && <PageCalls message={message} />}
      {writing && !speaking && !message.reasoning && !message.stream?.isCalling && <Waiting />}
      {!writing && message.odds && <Odds odds={message.odds} />}
      {!writing && <Problem message={message} last={properties.last} />}
      {(!writing || message.content) && !editing && !passing && (
        <footer>
          <Actions {...properties} edit={edit} compared={compared} compare={() => compare(!compared)} />
          {settings.value.showStats && !writing && message.stats && <StatsLine stats={message.stats} model={message.model} />}
        </footer>
      )}
    </article>
  );
}

/** An answer, and another version of it for comparison. */
function Versions({ beside, model, children }: { beside: Message | undefined; model: string; children: ComponentChildren }): VNode {
  if (!beside) return <>{children}</>;
  return (
    <div class="versions">
      <section>
        {model && <h3>{modelName(model)}</h3>}
        {children}
      </section>
      <section aria-label={t("Compared version")}>
        {beside.model && <h3>{modelName(beside.model)}</h3>}
        <Markdown text={beside.content} writing={false} />
        {beside.stats && <StatsLine stats={beside.stats} model="" />}
      </section>
    </div>
  );
}
