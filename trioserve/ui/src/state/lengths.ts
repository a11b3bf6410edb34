// The share of the model's context that documents may fill.

import type { Attachment } from "../types";

/** Characters of a token, as an average of languages that errs on the short side. */
const PER_TOKEN = 3;

/** Characters of documents that fit into a context of some tokens. */
export function roomFor(contextSize: number): number {
  return (contextSize / 2) * PER_TOKEN;
}

/** True if files are too long to be sent whole. `contextSize` is in tokens; 0: not known. */
export function areTooLong(files: readonly Attachment[], contextSize: number): boolean {
  return contextSize > 0 && files.reduce((sum, { text }) => sum + text.length, 0) > roomFor(contextSize);
}
