// Has a text coloured again and again while it grows, one time after the other.

import type { Line } from "./highlightCode";

/** While code is written, it is coloured at most this often. */
const PAUSE_MS = 200;

export interface Coloured {
  code: string;
  lines: Line[];
}

type Highlight = (code: string, language: string) => Promise<Line[] | null>;

/** Colours what was wanted last; `show` gets each result, until `end` is called. */
export class Painter {
  private code = "";
  private language = "";
  private open = false;
  private busy = false;
  private ended = false;
  /** The text that was coloured last. */
  private last = "";
  /** The language in which it could not be done, and is not tried again. */
  private failed = "";

  constructor(
    private readonly show: (coloured: Coloured) => void,
    private readonly highlight: Highlight,
    private readonly pause: number = PAUSE_MS,
  ) {}

  /** `open`: more may come, and the last line is not worth the colours yet. */
  want(code: string, language: string, open: boolean): void {
    this.code = open ? code.slice(0, code.lastIndexOf("\n") + 1) : code;
    this.language = language;
    this.open = open;
    if (!this.busy && !this.ended) void this.work();
  }

  end(): void {
    this.ended = true;
  }

  private async work(): Promise<void> {
    this.busy = true;
    while (!this.ended && this.code !== this.last && this.language !== this.failed) {
      const { code, language } = this;
      const lines = await this.highlight(code, language);
      this.last = code;
      if (lines === null) this.failed = language;
      else if (!this.ended) this.show({ code, lines });
      if (this.open) await new Promise((resolve) => setTimeout(resolve, this.pause));
    }
    this.busy = false;
  }
}
