// The column of messages.

import type { ReadonlySignal } from "@preact/signals";
import type { RefObject, VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { Icon } from "../icon";
import { live, openChat, type OpenChat } from "../state/chats";
import { settings } from "../state/settings";
import { t } from "../words";
import { MessageView } from "./MessageView";
import { useFollower } from "./scroll";
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

  useLayoutEffect(() => follower.toEnd(), [follower, id]);
  useLayoutEffect(() => {
    if (written) follower.toEnd();
  }, [follower, written]);

  return (
    <div class="talk">
      <div class="talk-scroll" ref={column} tabIndex={-1}>
        <div class="talk-column" ref={content}>
          <h1 class="visually-hidden">{open?.chat.title}</h1>
          {open && <Messages key={id} open={open} column={column} />}
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

function Messages({ open, column }: { open: OpenChat; column: RefObject<HTMLElement | null> }): VNode {
  const { chat, path, branches } = open;
  const [first, setFirst] = useState(() => beginning(path, path.length));
  const from = Math.min(first, Math.max(0, path.length - 1));
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
        <MessageView
          key={message.parent ?? "first"} // so that the buttons keep the focus when another version is shown
          message={message}
          live={live(message.id)}
          index={branches.get(message.id)?.index}
          branches={branches.get(message.id)?.ids}
          last={from + index === path.length - 1}
          tool={names.get(message.id)}
        />
      ))}
    </>
  );
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
