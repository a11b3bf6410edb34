// The column of messages.

import type { ReadonlySignal } from "@preact/signals";
import { Fragment, type RefObject, type VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { Icon } from "../icon";
import { target } from "../shell/jump";
import { attempt } from "../shell/toasts";
import { live, openChat, type OpenChat } from "../state/chats";
import { sendAll } from "../state/context";
import { settings } from "../state/settings";
import { showBranch } from "../state/talk";
import type { ChatStart } from "../types";
import { t } from "../words";
import { Fold } from "./Fold";
import { MessageView } from "./MessageView";
import { startReading } from "./reading";
import { useFollower, type Follower } from "./scroll";
import { System } from "./System";
import { toolNames } from "./toolCalls";
import { beginning } from "./window";

/** The conversation that is open: a column that scrolls, and follows the answer while one is at its end. */
export function Conversation(): VNode {
  const column = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const follower = useFollower(column, content);
  const open = openChat.value;
  const id = open?.chat.id;
  const leaf = open?.path.at(-1);
  const written = leaf?.state === "writing" ? leaf.id : null;

  useEffect(startReading, []);
  useLayoutEffect(() => follower.toEnd(), [follower, id]);
  useLayoutEffect(() => {
    if (written) follower.toEnd();
  }, [follower, written]);

  return (
    <div class="talk">
      <div class="talk-scroll" ref={column} tabIndex={-1}>
        <div class="talk-column" ref={content}>
          <h1 class="visually-hidden">{open?.chat.title}</h1>
          {open && <Messages key={id} open={open} column={column} follower={follower} />}
        </div>
      </div>
      <ToEnd atEnd={follower.atEnd} go={() => follower.toEnd()} />
    </div>
  );
}

function ToEnd({ atEnd, go }: { atEnd: ReadonlySignal<boolean>; go: () => void }): VNode | null {
  if (atEnd.value) return null;
  return (
    <button type="button" class="icon-button to-end" aria-label={t("Go to the end")} title={t("Go to the end")} onClick={go}>
      <Icon name="arrow-down" />
    </button>
  );
}

interface MessagesProps {
  open: OpenChat;
  column: RefObject<HTMLElement | null>;
  follower: Follower;
}

function Messages({ open, column, follower }: MessagesProps): VNode {
  const { chat, path, branches } = open;
  const [first, setFirst] = useState(() => beginning(path, path.length));
  const from = Math.min(first, Math.max(0, path.length - 1));
  const wanted = target.value?.chat === chat.id ? target.value.message : null;
  useLayoutEffect(() => {
    if (wanted === null) return;
    const at = path.findIndex(({ id }) => id === wanted);
    if (at < 0) {
      void attempt(() => findBranch(wanted)); // then it is in the path
      return;
    }
    setFirst((before) => Math.min(before, at));
    requestAnimationFrame(() => {
      follower.leave(); // a chat opens at its end
      reveal(column.current, wanted);
    });
  }, [wanted, path]);
  const names = toolNames(path);
  const system = chat.system || settings.value.system;
  return (
    <>
      {from > 0 ? (
        <Earlier column={column} show={() => setFirst(beginning(path, from))} />
      ) : (
        system && <System text={system} />
      )}
      {path.slice(from).map((message, index) => (
        <Fragment key={message.parent ?? "first"} /* so that the buttons keep the focus when another version is shown */>
          {message.id === chat.start?.message && <Shortened start={chat.start} />}
          <MessageView
            message={message}
            live={live(message.id)}
            index={branches.get(message.id)?.index}
            branches={branches.get(message.id)?.ids}
            last={from + index === path.length - 1}
            tool={names.get(message.id)}
          />
        </Fragment>
      ))}
    </>
  );
}

/** Says that the model no longer gets what is above, and what it gets in its place. */
function Shortened({ start }: { start: ChatStart }): VNode {
  return (
    <div class="shortened">
      <p>
        {start.summary ? t("The model gets a summary of the messages above.") : t("The model no longer gets the messages above.")}
        <button type="button" class="button" onClick={() => void attempt(sendAll)}>
          {t("Send them again")}
        </button>
      </p>
      {start.summary && (
        <Fold class="card" icon="brain" title={t("Summary")}>
          <div class="card-body said" dir="auto">
            {start.summary}
          </div>
        </Fold>
      )}
    </div>
  );
}

/** Show the branch of a message that is looked for. */
async function findBranch(message: string): Promise<void> {
  try {
    await showBranch(message);
  } catch (error) {
    target.value = null;
    throw error;
  }
}

/** Put a message that was looked for on the screen, and make it stand out for a moment. */
function reveal(column: HTMLElement | null, message: string): void {
  target.value = null;
  const found = column?.querySelector(`[data-message="${CSS.escape(message)}"]`);
  found?.scrollIntoView({ block: "start" });
  found?.animate([{ background: "var(--accent-soft)" }, {}], { duration: 2_000, easing: "ease-in" });
}

/** Shows earlier messages when one comes near to it; what is on the screen stays where it is. */
function Earlier({ column, show }: { column: RefObject<HTMLElement | null>; show: () => void }): VNode {
  const button = useRef<HTMLButtonElement>(null);
  const showing = useRef(show);
  showing.current = () => {
    const next = button.current?.nextElementSibling;
    const before = next?.getBoundingClientRect().top ?? 0;
    show();
    requestAnimationFrame(() => {
      if (column.current && next) column.current.scrollTop += next.getBoundingClientRect().top - before;
    });
  };
  useEffect(() => {
    const seen = new IntersectionObserver(
      (entries) => {
        if (entries.some((entry) => entry.isIntersecting)) showing.current();
      },
      { root: column.current, rootMargin: "1200px 0px" },
    );
    if (button.current) seen.observe(button.current);
    return () => seen.disconnect();
  });
  return (
    <button type="button" class="button earlier" ref={button} onClick={() => showing.current()}>
      {t("Show earlier messages")}
    </button>
  );
}
