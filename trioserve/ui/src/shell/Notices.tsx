import { useSignal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect } from "preact/hooks";

import { retryNow, server } from "../state/server";
import { storage } from "../state/storage";
import type { ServerState, StorageStatus } from "../types";
import { t, type Text } from "../words";
import { ContextNotice } from "./ContextNotice";
import { KeyField } from "./KeyField";
import { ModelNotice } from "./ModelNotice";
import { Notice } from "./Notice";

/** Notices about the server, and about this chat. */
export function Notices(): VNode {
  return (
    <div class="notices" role="status">
      <ServerNotice />
      <ModelNotice />
      <StorageNotice />
      <ContextNotice />
    </div>
  );
}

const unkept: Partial<Record<StorageStatus, Text>> = {
  memory: "This browser window keeps no data: chats are gone when it is closed.",
  full: "The browser’s storage is full: what is new is not kept. Export or delete some chats.",
};

function StorageNotice(): VNode | null {
  const text = unkept[storage.value];
  return text ? <Notice icon="alert" about={t(text)}>{t(text)}</Notice> : null;
}

const words: Partial<Record<ServerState, Text>> = {
  loading: "The model is loading. You can already write.",
  sleeping: "The model is asleep. Your next message wakes it.",
  draining: "The server is shutting down. It takes no new messages until it is back.",
  full: "The server is full.",
  unreachable: "The server cannot be reached.",
};

function ServerNotice(): VNode | null {
  const { state, message, retryAt } = server.value;
  if (state === "needs-key") {
    return (
      <Notice icon="key">
        <p>{t("This server requires an API key.")}</p>
        <KeyField />
      </Notice>
    );
  }
  const says = words[state];
  if (!says) return null;
  const isQuiet = state === "sleeping" || state === "loading";
  return (
    <Notice icon={isQuiet ? "moon" : "alert"} quiet={isQuiet}>
      <p>
        {message || t(says)}
        {retryAt !== undefined && <Countdown until={retryAt} />}
      </p>
      {!isQuiet && (
        <button type="button" class="button" onClick={retryNow}>
          {t("Try now")}
        </button>
      )}
    </Notice>
  );
}

function Countdown({ until }: { until: number }): VNode {
  const now = useSignal(Date.now());
  useEffect(() => {
    const timer = setInterval(() => (now.value = Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  const left = Math.ceil((until - now.value) / 1000);
  return <span aria-hidden="true">{" "}{left > 0 ? t("The page tries again in {left} s.", { left }) : t("Trying again…")}</span>;
}
