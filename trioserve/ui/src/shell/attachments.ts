/** Files that go with a message: read as text, or taken as pictures, recordings and videos. */

import { kindOf, PDF } from "../state/media";
import { props, takes } from "../state/server";
import type { Attachment, MediaKind } from "../types";
import { t } from "../words";
import { bytes, quoted } from "./format";
import { readPicture } from "./pictures";

/** The largest text that is taken. More would not fit into the context of a model. */
export const MAX_TEXT = 1_000_000;

/** The largest file of another kind. Base64 adds a third, and a server takes 100 MiB by default. */
export const MAX_MEDIA = 50_000_000;

const NAMES: Record<MediaKind, string> = { image: "pictures", audio: "recordings", video: "videos" };

/** The media that the model takes beside texts, in words; empty: no media. */
export function mediaTaken(): string[] {
  return (["image", "audio", "video"] as const).filter(takes).map((kind) => NAMES[kind]);
}

/** Why a file is not taken, for people; null: it is, or the server has not said. */
export function refusal({ name, type, data }: Pick<Attachment, "name" | "type" | "data">): string | null {
  if (!data) return null; // a text
  const kind = kindOf(type);
  if (kind && takes(kind) === false) return t("{name} is not attached: this model takes no {NAMES}.", { name: quoted(name), NAMES: NAMES[kind] });
  if (type !== PDF || props.value?.takes_pdf !== false) return null;
  return t("{name} is not attached: this server reads no PDFs. It needs the extra trioserve[pdf].", { name: quoted(name) });
}

/** Read a file; an Error for people says why it cannot be attached. */
export async function readAttachment(file: File, id: string): Promise<Attachment> {
  const { name, type, size } = file;
  // The server reads it: the model gets the text of each page, and a picture of it if it sees pictures.
  if ((await file.slice(0, 5).text()) === "%PDF-") return readMedia(new File([file], name, { type: PDF }), id);
  // By what is in it: browsers take a program in TypeScript for a video.
  const text = size > MAX_TEXT ? null : decode(new Uint8Array(await file.arrayBuffer()));
  if (text !== null) return { id, name, type: type || "text/plain", size, text };
  if (kindOf(type)) return readMedia(file, id);
  if (size > MAX_TEXT) throw tooLarge(name, MAX_TEXT);
  throw new Error(t("{name} is neither a text nor a PDF, a picture, a recording or a video.", { name: quoted(name) }));
}

async function readMedia(file: File, id: string): Promise<Attachment> {
  const { name } = file;
  const why = refusal({ name, type: file.type, data: file });
  if (why) throw new Error(why);
  const read = kindOf(file.type) === "image" ? await readPicture(file) : file;
  if (read.size > MAX_MEDIA) throw tooLarge(name, MAX_MEDIA);
  const type = read.type.replace(/;.*/, ""); // a recording’s has its codec, too
  // A copy: the file itself may change, or go, before the message is sent.
  const data = new Blob([await read.arrayBuffer()], { type });
  return { id, name, type, size: data.size, text: "", data };
}

function tooLarge(name: string, limit: number): Error {
  return new Error(t("{name} is too large. The limit is {limit}.", { name: quoted(name), limit: bytes(limit) }));
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
