// The output of tools, for people to read: without the codes of terminals, and not more than a page bears.

import { count } from "../shell/format";
import { isRecord } from "../state/json";
import { several, t } from "../words";
import { revealed } from "./links";

const CODES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[PX^_][^\u001b]*(?:\u001b\\)?|[ -/]*[0-~])/g;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;

/** The text that a terminal would leave on the screen, roughly: a line that is overwritten has its last text. */
export function screenText(text: string): string {
  const lines = text.replace(CODES, "").replaceAll("\r\n", "\n").split("\n");
  return lines.map((line) => lastWritten(line).replace(CONTROLS, "")).join("\n");
}

function lastWritten(line: string): string {
  const ended = line.replace(/\r+$/, "");
  return ended.slice(ended.lastIndexOf("\r") + 1);
}

/** A text with all that would hide or change what it says made visible: a person decides by it. */
export function exposed(text: string): string {
  return revealed(text).replace(CONTROLS, (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A part of a text, and how many lines it has of how many. */
export interface Part {
  text: string;
  lines: number;
  all: number;
}

/** The beginning of a text, or its end, up to a number of lines and characters. */
export function partOf(text: string, most: { lines: number; characters: number }, from: "start" | "end" = "start"): Part {
  const all = text.split("\n");
  const wanted = from === "start" ? all.slice(0, most.lines) : all.slice(-most.lines);
  const joined = wanted.join("\n");
  if (joined.length <= most.characters) return { text: joined, lines: wanted.length, all: all.length };
  const cut = from === "start" ? joined.slice(0, most.characters) : joined.slice(-most.characters);
  return { text: cut, lines: cut.split("\n").length, all: all.length };
}

/** The error of a failed call, if that is all that its result says. */
export function errorIn(result: string): string | null {
  try {
    const value: unknown = JSON.parse(result);
    if (!isRecord(value) || Object.keys(value).length !== 1) return null;
    return typeof value.error === "string" ? value.error : null;
  } catch {
    return null;
  }
}

export interface DiffLine {
  /** "left": says what the server has left out here. */
  kind: "added" | "removed" | "same" | "place" | "left";
  text: string;
  /** Its number in the file: as it was if it is removed, else as it is now. */
  number?: number;
}

export interface FileDiff {
  /** The lines, without the names of the files. */
  lines: DiffLine[];
  added: number;
  removed: number;
  /** Lines that are so long that their middle is folded. */
  long: number;
  /** True if the server has left out a part, or all of it, as of a file that is not text. */
  isPart: boolean;
}

/** The lines of a change, and the characters of a line, that a fold shows at each end. */
export const ENDS = { lines: 100, characters: 1_000 };

/** Read a unified diff. */
export function readDiff(diff: string): FileDiff {
  const found: FileDiff = { lines: [], added: 0, removed: 0, long: 0, isPart: false };
  let old = 0;
  let now = 0;
  let isInside = false; // not before the first hunk, where the files are named
  for (const line of diff.replace(/\n$/, "").split("\n")) {
    const place = /^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@/.exec(line);
    const [sign, text] = [line[0], exposed(line.slice(1).replace(/\r$/, ""))];
    if (place) {
      [old, now, isInside] = [Number(place[1]), Number(place[2]), true];
      found.lines.push({ kind: "place", text: exposed(line) });
    } else if (!isInside || sign === "\\") continue;
    else if (sign === "[") {
      found.lines.push({ kind: "left", text: exposed(line) }); // the lines of files begin with another sign
      found.isPart = true;
    } else if (sign === "+") {
      found.lines.push({ kind: "added", text, number: now++ });
      found.added += 1;
    } else if (sign === "-") {
      found.lines.push({ kind: "removed", text, number: old++ });
      found.removed += 1;
    } else {
      found.lines.push({ kind: "same", text, number: now++ });
      old += 1;
    }
    if (text.length > 2 * ENDS.characters) found.long += 1;
  }
  found.isPart ||= found.lines.length === 0;
  return found;
}

/** The number of lines that a fold hides. */
export function folded({ lines }: FileDiff): number {
  return Math.max(0, lines.length - 2 * ENDS.lines);
}

/** The part of a change that its preview leaves out, in words; "" if it shows all of it. */
export function unshown(diff: FileDiff, isWhole: boolean): string {
  const left = folded(diff);
  const parts = [
    diff.isPart && (diff.lines.length ? t("a part of the change") : t("the change")),
    !isWhole && left > 0 && t("{left} of its lines", { left: count(left) }),
    !isWhole && diff.long > 0 && several(diff.long, "the middle of {number} long line", "the middle of {number} long lines", { number: count(diff.long) }),
  ].filter(Boolean);
  return parts.join(", ");
}

/** The argument that tells most of a call, in one line: a command, a pattern, a path, or the first one. */
export function gist(written: string): string {
  let value: unknown;
  try {
    value = JSON.parse(written);
  } catch {
    return ""; // what was written is in the card
  }
  if (!isRecord(value)) return "";
  const texts = Object.values(value).filter((one) => typeof one === "string" || typeof one === "number");
  const best = value.command ?? value.pattern ?? value.path ?? texts[0] ?? "";
  return exposed(String(best).slice(0, 120).replace(/\s+/g, " "));
}
