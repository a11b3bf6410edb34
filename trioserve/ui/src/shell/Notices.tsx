import { useSignal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect } from "preact/hooks";

import { retryNow, server } from "../state/server";
import { storage } from "../state/storage";
import type { ServerState } from "../types";
import { t } from "../words";
import { lastStats } from "./Composer";
import { percent } from "./format";
import { KeyField } from "./KeyField";
import { ModelNotice } from "./ModelNotice";
import { Notice } from "./Notice";
import { startChat } from "./shortcuts";

/** The share of the context above which a conversation will soon be full. */
const NEARLY_FULL = 0.9;

/** What people have to know of the server, and of this chat. */
export function Notices(): VNode {
  return (
    <div class="notices" role="status">
      <ServerNotice />
      <ModelNotice />
      {storage.value.state !== "kept" && <Notice icon="alert">{storage.value.message}</Notice>}
      <ContextNotice />
    </div>
  );
}

const words: Partial<Record<ServerState, string>> = {
  loading: "The model is loading. You can write already.",
  sleeping: "The model sleeps. Your next message wakes it up.",
  draining: "The server is shutting down. It takes no new messages until it is back.",
  full: "The server is full.",
  unreachable: "The server cannot be reached.",
};

function ServerNotice(): VNode | null {
  const { state, message, retryAt } = server.value;
  if (state === "needs-key") {
    return (
      <Notice icon="key">
        <p>{t("This server wants an API key.")}</p>
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
        {message || says}
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
  return <span aria-hidden="true">{left > 0 ? t(" The page tries again in {left} s.", { left }) : t(" Trying again…")}</span>;
}

function ContextNotice(): VNode | null {
  const stats = lastStats();
  if (!stats?.contextSize || stats.contextUsed / stats.contextSize < NEARLY_FULL) return null;
  return (
    <Notice icon="alert">
      <p>{t("This chat fills {contextUsed} of the model’s context. Soon it will not fit.", { contextUsed: percent(stats.contextUsed / stats.contextSize) })}</p>
      <button type="button" class="button" onClick={startChat}>
        {t("New chat")}
      </button>
    </Notice>
  );
}
