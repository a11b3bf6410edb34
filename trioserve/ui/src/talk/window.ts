// The messages of a long conversation that are on the page: the last ones, and more as one scrolls up.

import type { Message } from "../types";

/** The maximum of messages and of text that are drawn at once. */
const MOST = 20;
const TEXT = 30_000;
const LEAST = 4;

/** Where to begin so that the messages before `end` fill some screens, and take little time to draw. */
export function beginning(path: readonly Message[], end: number): number {
  let first = end;
  for (let text = 0; first > 0; first -= 1) {
    const { content, reasoning } = path[first - 1] as Message;
    text += content.length + reasoning.length;
    const taken = end - first;
    if (taken >= MOST || (taken >= LEAST && text > TEXT)) break;
  }
  return first;
}
