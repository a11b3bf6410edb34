import { effect, signal, useComputed } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect } from "preact/hooks";

import { Icon } from "../icon";
import { openChat } from "../state/chats";
import { runs } from "../state/runs";
import { props } from "../state/server";
import { settings } from "../state/settings";
import { t } from "../words";
import { mediaTaken } from "./attachments";
import { Composer } from "./Composer";
import { attach } from "./draft";
import { Header } from "./Header";
import { later } from "./later";
import { ModelList } from "./ModelMenu";
import { Notices } from "./Notices";
import { Outbox } from "./Outbox";
import { RunStatus } from "./RunStatus";
import { Sidebar } from "./Sidebar";
import { listenToKeys } from "./shortcuts";
import { Toasts } from "./toasts";
import { activityShown, focusComposer, overlay, sidebarShown, uncover, wide } from "./view";
import { Welcome } from "./Welcome";

const Conversation = later(async () => (await import("../talk/Conversation")).Conversation);
const Activity = later(async () => (await import("./Activity")).Activity);
const Settings = later(async () => (await import("./Settings")).Settings);
const Models = later(async () => (await import("./Models")).Models);
const LoadForm = later(async () => (await import("./LoadForm")).LoadForm);
const Embeddings = later(async () => (await import("./Embeddings")).Embeddings);
const Draw = later(async () => (await import("./Draw")).Draw);
const Help = later(async () => (await import("./Help")).Help);

/** True while files are held over the page. */
const dragging = signal(false);

/** The whole page. */
export function App(): VNode {
  useEffect(() => {
    void Conversation.fetch(); // the frame is on the screen before; the first message will want it
    void ModelList.fetch();
    const ends = [listenToKeys(), listenToDrags(), showTheme(), showTitle()];
    return () => ends.forEach((end) => end());
  }, []);
  const isCovered = !wide.value && (sidebarShown.value || activityShown.value);
  return (
    <div class="frame">
      <button type="button" class="button skip" onClick={focusComposer}>
        {t("Skip to the message")}
      </button>
      {sidebarShown.value && <Sidebar />}
      {isCovered && <div class="scrim" onClick={uncover} />}
      <Column covered={isCovered} />
      {activityShown.value && <Activity />}
      <Overlay />
      {dragging.value && <DropZone />}
      {overlay.value === null && <Toasts />}
    </div>
  );
}

function Column({ covered }: { covered: boolean }): VNode {
  const isOpen = useComputed(() => openChat.value !== null);
  const isEmpty = useComputed(() => openChat.value?.path.length === 0);
  return (
    <main class={isEmpty.value ? "column empty" : "column"} inert={covered}>
      <Header />
      {props.value?.endpoint_chat === false ? <Embeddings /> : isOpen.value && <Chat isEmpty={isEmpty.value === true} />}
    </main>
  );
}

function Chat({ isEmpty }: { isEmpty: boolean }): VNode {
  return (
    <>
      {isEmpty ? <Welcome /> : <Conversation />}
      <div class="dock">
        <Notices />
        <RunStatus />
        <Outbox />
        <Composer />
      </div>
    </>
  );
}

function Overlay(): VNode | null {
  const shown = overlay.value;
  if (shown === null) return null;
  if (shown === "help") return <Help />;
  if (shown === "draw") return <Draw />;
  if (shown === "models") return <Models />;
  return "load" in shown ? <LoadForm model={shown.load} /> : <Settings section={shown.settings} />;
}

function DropZone(): VNode {
  return (
    <div
      class="drop-zone"
      onDragOver={(event) => event.preventDefault()}
      onDragLeave={() => (dragging.value = false)}
      onDrop={(event) => {
        event.preventDefault();
        dragging.value = false;
        void attach([...(event.dataTransfer?.files ?? [])]).then(focusComposer);
      }}
    >
      <p>
        <Icon name="file" />
        {mediaTaken().length > 0 ? t("Drop files to attach them") : t("Drop text files to attach them")}
      </p>
    </div>
  );
}

function listenToDrags(): () => void {
  const enter = (event: DragEvent) => {
    if (event.dataTransfer?.types.includes("Files")) dragging.value = true;
  };
  addEventListener("dragenter", enter);
  return () => removeEventListener("dragenter", enter);
}

function showTheme(): () => void {
  return effect(() => {
    const { theme } = settings.value;
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  });
}

function showTitle(): () => void {
  return effect(() => {
    const title = openChat.value?.path.length ? openChat.value.chat.title : "";
    const waiting = [...runs.value.values()].filter(({ phase }) => phase === "asking").length;
    document.title = `${waiting ? `(${waiting}) ` : ""}${title ? `${title} – ` : ""}trioserve`;
  });
}
