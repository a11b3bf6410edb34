/** Files that go with a message, read as text. */

import type { Attachment } from "../types";
import { quoted } from "./format";

/** The largest file that is taken. More would not fit into the context of a model. */
export const MAX_BYTES = 1_000_000;

/** Read a file as text; an Error for people says why it cannot be. */
export async function readAttachment(file: File, id: string): Promise<Attachment> {
  const { name, type, size } = file;
  if (size > MAX_BYTES) throw new Error(`${quoted(name)} is too large. The limit is 1 MB.`);
  const text = decode(new Uint8Array(await file.arrayBuffer()));
  if (text === null) throw new Error(`${quoted(name)} is not a text file.`);
  return { id, name, type: type || "text/plain", size, text };
}

/** The text of bytes in UTF-8, in UTF-16 with a mark, or in Windows' old encoding; null: not a text. */
export function decode(bytes: Uint8Array): string | null {
  const [first, second] = bytes;
  if (first === 0xff && second === 0xfe) return new TextDecoder("utf-16le").decode(bytes);
  if (first === 0xfe && second === 0xff) return new TextDecoder("utf-16be").decode(bytes);
  if (bytes.includes(0)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
  }
  const text = new TextDecoder("windows-1252").decode(bytes);
  // Pictures and archives have such characters all over, texts have hardly any.
  return /[\x01-\x08\x0e-\x1a\x1c-\x1f]/.test(text) ? null : text;
}
