// Frames in which things run apart from the page: in a separate origin, without the network and without storage.
// The server allows scripts and styles in them, and nothing else (`trioserve/api/pages.py`).

import type { Drawn } from "../sandbox/mermaid";
import { t } from "../words";

declare const SANDBOX: string;
declare const MERMAID: string;

/** Fill a frame with a page. */
export function fill(frame: HTMLIFrameElement, html: string): void {
  frame.sandbox.value = "allow-scripts";
  frame.addEventListener("load", () => frame.contentWindow?.postMessage(html, "*"), { once: true });
  frame.src = new URL(SANDBOX, document.baseURI).href;
}

/** Milliseconds that a diagram may take, and the code that draws it. */
const PATIENCE = 20_000;

/** The frame that draws, once it takes orders. */
let drawing: Promise<HTMLIFrameElement> | null = null;
/** The end of the diagram before. */
let before: Promise<unknown> = Promise.resolve();
let lastId = 0;

/** Draw a diagram as SVG, one after the other. An Error for people says why it cannot be drawn. */
export function drawDiagram(text: string, isDark: boolean): Promise<string> {
  const drawn = before.then(() => drawNow(text, isDark));
  before = drawn.catch(() => undefined);
  return drawn;
}

async function drawNow(text: string, isDark: boolean): Promise<string> {
  let frame: HTMLIFrameElement | undefined;
  try {
    frame = await (drawing ??= beginDrawing());
    const id = ++lastId;
    frame.contentWindow?.postMessage({ id, text, isDark }, "*");
    const { svg, error } = (await answerOf(frame, (data) => (data as Drawn).id === id)) as Drawn;
    if (svg) return svg;
    throw new DiagramError(error || t("It is empty."));
  } catch (error) {
    if (!(error instanceof DiagramError)) {
      frame?.remove(); // it hangs: the next diagram gets another one
      drawing = null;
    }
    throw error;
  }
}

/** The text of a diagram is wrong. */
class DiagramError extends Error {}

async function beginDrawing(): Promise<HTMLIFrameElement> {
  const response = await fetch(new URL(MERMAID, document.baseURI));
  if (!response.ok) throw new Error(t("A part of the page could not be loaded. Try again, or reload the page."));
  const code = (await response.text()).replaceAll("</script", "<\\/script");
  const frame = document.createElement("iframe");
  frame.className = "off-screen";
  frame.tabIndex = -1;
  frame.ariaHidden = "true";
  fill(frame, `<!doctype html><meta charset="utf-8"><body><script>${code}</script>`);
  document.body.append(frame);
  await answerOf(frame, (data) => data === "ready");
  return frame;
}

/** The next message of a frame that fits. */
function answerOf(frame: HTMLIFrameElement, fits: (data: unknown) => boolean): Promise<unknown> {
  return new Promise((resolve, reject) => {
    const end = new AbortController();
    const timer = setTimeout(() => {
      end.abort();
      reject(new Error(t("It takes too long.")));
    }, PATIENCE);
    const listen = ({ data, source }: MessageEvent): void => {
      if (source !== frame.contentWindow || !fits(data)) return;
      clearTimeout(timer);
      end.abort();
      resolve(data);
    };
    addEventListener("message", listen, { signal: end.signal });
  });
}
