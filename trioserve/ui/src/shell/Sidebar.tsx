import { signal, useComputed } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { Icon } from "../icon";
import { chats, openChat, search, type Found } from "../state/chats";
import type { Chat } from "../types";
import { several, t } from "../words";
import { ChatRow } from "./ChatRow";
import { useFocus } from "./focus";
import { count, era } from "./format";
import { goToMessage } from "./jump";
import { keyNames } from "./keys";
import { goTo } from "./route";
import { SelectionBar } from "./selection";
import { mac, startChat } from "./shortcuts";
import { attempt } from "./toasts";
import { focusAgain, focusComposer, overlay, showSidebar, uncover, wide } from "./view";

/** Chats that are drawn at first, and added each time the list is scrolled to its end. */
const PAGE = 60;

const found = signal<Found[] | null>(null);

/** The chats, and the ways to everything else. */
export function Sidebar(): VNode {
  // Over the conversation it takes the focus, which is behind it else.
  const first = useFocus<HTMLButtonElement>(!wide.value);
  const begin = () => {
    uncover();
    startChat();
  };
  const hide = () => {
    showSidebar(false);
    focusAgain();
  };
  const newKeys = keyNames({ key: "o", mod: true, shift: true }, mac).join(mac ? "" : "+");
  return (
    <nav class="sidebar" aria-label={t("Chats")}>
      <div class="sidebar-head">
        <span class="brand">trioserve</span>
        <button ref={first} type="button" class="icon-button" aria-label={t("Hide the chats")} onClick={hide}>
          <Icon name="sidebar" />
        </button>
      </div>
      <button type="button" class="button new-chat" title={newKeys} onClick={begin}>
        <Icon name="plus" />
        {t("New chat")}
      </button>
      <SearchField />
      <ChatList />
      <SelectionBar />
      <div class="sidebar-foot">
        <button type="button" class="row-button" onClick={() => (overlay.value = { settings: "general" })}>
          <Icon name="gear" />
          {t("Settings")}
        </button>
        <button
          type="button"
          class="icon-button"
          aria-label={t("Keyboard shortcuts")}
          title={t("Keyboard shortcuts (?)")}
          onClick={() => (overlay.value = "help")}
        >
          <kbd>?</kbd>
        </button>
      </div>
    </nav>
  );
}

function SearchField(): VNode {
  const [text, setText] = useState("");
  const all = chats.value;
  useEffect(() => {
    const wanted = text.trim();
    if (!wanted) {
      found.value = null;
      return undefined;
    }
    let stale = false;
    const look = async () => {
      const result = await search(wanted);
      if (!stale) found.value = result;
    };
    const timer = setTimeout(() => void attempt(look), 120);
    return () => {
      stale = true;
      clearTimeout(timer);
    };
  }, [text, all]);

  // A quick typist does not wait for the list.
  const openFirst = async () => {
    const [first] = text.trim() ? await search(text.trim()) : [];
    if (!first) return;
    const [hit] = first.hits;
    if (hit) goToMessage(first.chat.id, hit.message);
    else goTo(first.chat.id);
    uncover();
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Escape") {
      event.preventDefault();
      if (text) setText("");
      else focusComposer();
    } else if (event.key === "Enter") {
      void attempt(openFirst);
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      document.querySelector<HTMLElement>(".chat-link")?.focus();
    }
  };
  return (
    <div class="search">
      <Icon name="search" />
      <input
        id="search"
        type="search"
        class="field"
        placeholder={t("Search")}
        aria-label={t("Search the chats")}
        autocomplete="off"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={onKey}
      />
    </div>
  );
}

function ChatList(): VNode {
  const [limit, setLimit] = useState(PAGE);
  const end = useRef<HTMLDivElement>(null);
  const hits = new Map(found.value?.map((one) => [one.chat.id, one]));
  const list = found.value?.map(({ chat }) => chat) ?? chats.value;
  const shown = list.slice(0, limit);
  const open = useComputed(() => openChat.value?.chat.id);

  useEffect(() => {
    if (!end.current) return undefined;
    const observer = new IntersectionObserver(([entry]) => {
      if (entry?.isIntersecting) setLimit((before) => before + PAGE);
    });
    observer.observe(end.current);
    return () => observer.disconnect();
  }, [shown.length, list.length]);

  return (
    <div class="chat-list" onKeyDown={moveInList}>
      <p class="visually-hidden" role="status">
        {found.value && several(list.length, "{number} chat found", "{number} chats found", { number: count(list.length) })}
      </p>
      {list.length === 0 && <p class="hint">{found.value ? t("No chat has these words.") : t("Your chats will be here.")}</p>}
      {byEra(shown, Date.now()).map(([title, ofEra]) => (
        <section key={title} aria-label={title}>
          <h2>{title}</h2>
          <ul>
            {ofEra.map((chat) => (
              <ChatRow key={chat.id} chat={chat} current={chat.id === open.value} found={hits.get(chat.id)} />
            ))}
          </ul>
        </section>
      ))}
      {shown.length < list.length && <div ref={end} class="list-end" />}
    </div>
  );
}

/** Chats under the headings of their times, in their order. */
function byEra(list: Chat[], now: number): [string, Chat[]][] {
  const groups = new Map<string, Chat[]>();
  for (const chat of list) {
    const title = chat.pinned ? t("Pinned") : era(chat.updatedAt, now);
    const group = groups.get(title);
    if (group) group.push(chat);
    else groups.set(title, [chat]);
  }
  return [...groups];
}

/** The arrow keys go from chat to chat. */
function moveInList(event: KeyboardEvent & { currentTarget: HTMLElement }): void {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!by || event.altKey || !(event.target instanceof HTMLAnchorElement)) return;
  event.preventDefault();
  const links = [...event.currentTarget.querySelectorAll<HTMLElement>(".chat-link")];
  const to = links.indexOf(event.target) + by;
  if (to < 0) document.getElementById("search")?.focus();
  else links[to]?.focus();
}
