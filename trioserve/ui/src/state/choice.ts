// Which model the open chat speaks with.

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

/** The same of another chat. */
export function modelOf(chat: Chat | undefined): string {
  const wanted = chat?.model || settings.value.model;
  const all = models.value;
  const isThere = all.some(({ id, aliases }) => id === wanted || aliases.includes(wanted));
  if (wanted && (isThere || all.length === 0)) return wanted;
  return (all.find(({ status }) => status === "loaded") ?? all[0])?.id ?? "";
}
