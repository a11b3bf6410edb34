// Reads a stream of server-sent events, and counts its bytes.

export interface SseEvent {
  kind: "event";
  name: string;
  data: string;
  /** Bytes of the stream up to the end of this event: where the next one begins. */
  offset: number;
}

/** A comment between events, such as a place in the queue. */
export interface SseComment {
  kind: "comment";
  text: string;
}

export type SseItem = SseEvent | SseComment;

const NEWLINE = 10;
const NOTHING = new Uint8Array(0);

/**
 * Takes the bytes of a stream as they come, cut anywhere. Lines end as the server ends them: with
 * a newline, or with CR LF.
 */
export class SseParser {
  #offset: number;
  #rest: Uint8Array = NOTHING;
  #data: string[] = [];
  #name = "";
  #id: number | null = null;
  readonly #decoder = new TextDecoder();

  /** `offset` is where in the stream the bytes begin. */
  constructor(offset = 0) {
    this.#offset = offset;
  }

  /** The events and comments that these bytes complete. */
  push(chunk: Uint8Array): SseItem[] {
    const items: SseItem[] = [];
    const searchFrom = this.#rest.length;
    const bytes = searchFrom === 0 ? chunk : joined(this.#rest, chunk);
    let start = 0;
    let end = bytes.indexOf(NEWLINE, searchFrom);
    while (end >= 0) {
      this.#offset += end + 1 - start;
      const item = this.#line(this.#decoder.decode(bytes.subarray(start, end)));
      if (item) items.push(item);
      start = end + 1;
      end = bytes.indexOf(NEWLINE, start);
    }
    this.#rest = start === bytes.length ? NOTHING : bytes.slice(start);
    return items;
  }

  #line(whole: string): SseItem | null {
    const line = whole.endsWith("\r") ? whole.slice(0, -1) : whole;
    if (line === "") return this.#end();
    if (line.startsWith(":")) return { kind: "comment", text: line.slice(1).trim() };
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#name = value;
    // The id of an event is the offset after it. It is right even where a proxy has put comments
    // between the events.
    else if (field === "id" && /^\d{1,15}$/.test(value)) this.#id = Number(value);
    return null;
  }

  #end(): SseEvent | null {
    const event: SseEvent = {
      kind: "event",
      name: this.#name || "message",
      data: this.#data.join("\n"),
      offset: (this.#offset = this.#id ?? this.#offset),
    };
    const isEvent = this.#data.length > 0;
    this.#data = [];
    this.#name = "";
    this.#id = null;
    return isEvent ? event : null;
  }
}

function joined(first: Uint8Array, second: Uint8Array): Uint8Array {
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}
