// The model that the open chat speaks with.

import { computed, type ReadonlySignal } from "@preact/signals";

import type { Chat } from "../types";
import { models } from "./models";
import { settings } from "./settings";
import { openChat } from "./shown";

/**
 * The model of the open chat, of the settings, or else one that is loaded; empty while none is
 * known.
 */
export const chosenModel: ReadonlySignal<string> = computed(() => modelOf(openChat.value?.chat));

/** The model of chats that choose none; it stays the default when it is unloaded. */
let byDefault = "";

/** The same of another chat. */
export function modelOf(chat: Chat | undefined): string {
  const all = models.value;
  const wanted = chat?.model || settings.value.model;
  const isThere = (name: string) => all.some(({ id, aliases }) => id === name || aliases.includes(name));
  if (wanted && (isThere(wanted) || all.length === 0)) return wanted;
  if (!isThere(byDefault)) byDefault = (all.find(({ status }) => status === "loaded") ?? all[0])?.id ?? "";
  return byDefault;
}
