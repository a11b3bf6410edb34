// Files that are no text: pictures, recordings, videos and PDFs.

import type { Attachment, MediaKind } from "../types";
import { t } from "../words";

export const PDF = "application/pdf";

/** The types that a file of an import may have. The page shows none that can hold a script. */
const KNOWN = /^(image\/(png|jpeg|webp|gif|bmp)|(audio|video)\/[\w.+-]{1,40}|application\/pdf)$/;

/** A file is gone from where the browser had it. The message is for people. */
export class UnreadableError extends Error {}

/** The kind of a file of that type; null: no media. */
export function kindOf(type: string): MediaKind | null {
  const kind = type.slice(0, type.indexOf("/"));
  return kind === "image" || kind === "audio" || kind === "video" ? kind : null;
}

/** The data URL of a binary file. */
export function dataUrlOf(file: Attachment): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new UnreadableError(t("The browser no longer has the file {name}.", { name: file.name })));
    reader.readAsDataURL(file.data!);
  });
}

/** The content of a data URL; null: it is malformed, or the page does not show its type. */
export function blobIn(url: string): Blob | null {
  const [, type = "", base64 = ""] = /^data:([^;,]*);base64,(.*)$/s.exec(url) ?? [];
  if (!KNOWN.test(type)) return null;
  try {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    return new Blob([bytes], { type });
  } catch {
    return null;
  }
}
