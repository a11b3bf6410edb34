// Draws diagrams, in the sandbox: the page sends texts and gets pictures or errors.

import mermaid from "mermaid";

/** An order of the page, and its answer. */
export interface Order {
  id: number;
  text: string;
  isDark: boolean;
}
export interface Drawn {
  id: number;
  svg?: string;
  error?: string;
}

const settings = {
  startOnLoad: false,
  securityLevel: "strict",
  htmlLabels: false, // a picture has no HTML in it
  suppressErrorRendering: true,
  maxTextSize: 20_000,
  layout: "dagre", // elk would double the size of this code
  // Settings that a diagram may not change.
  secure: ["secure", "securityLevel", "startOnLoad", "htmlLabels", "suppressErrorRendering", "maxTextSize", "maxEdges", "layout"],
} as const;

addEventListener("message", ({ data, source }: MessageEvent<Order>) => {
  if (source === parent) void draw(data).then((drawn) => parent.postMessage(drawn, "*"));
});

async function draw({ id, text, isDark }: Order): Promise<Drawn> {
  try {
    mermaid.initialize({ ...settings, secure: [...settings.secure], theme: isDark ? "dark" : "default" });
    const { svg } = await mermaid.render(`diagram-${id}`, text);
    return { id, svg: sized(svg) };
  } catch (error) {
    return { id, error: error instanceof Error ? error.message : String(error) };
  }
}

/** With its size in pixels: a picture that has none is shown at the size that the browser likes. */
function sized(svg: string): string {
  const [, width, height] = /viewBox="\S+ \S+ (\S+) (\S+)"/.exec(svg) ?? [];
  return width ? svg.replace(/ width="100%"/, ` width="${width}" height="${height}"`) : svg;
}

parent.postMessage("ready", "*");
