import type { VNode } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { t } from "../words";

import { attach } from "./draft";
import { Dialog } from "./Dialog";
import { attempt } from "./toasts";
import { focusComposer, overlay } from "./view";

/** Pixels of a side of the picture, and of the line. */
const SIDE = 512;
const WIDTH = 26;

const COLORS = {
  Black: "#111111",
  Red: "#dc1f1f",
  Orange: "#f58410",
  Yellow: "#f5d80f",
  Green: "#22a03c",
  Blue: "#1f5fe0",
  Purple: "#8a2fb8",
  Pink: "#f78fc4",
};

interface Line {
  color: string;
  points: [number, number][];
}

/** A sheet to draw on with a mouse, a pen or a finger; the drawing is attached as a picture. */
export function Draw(): VNode {
  const sheet = useRef<HTMLCanvasElement>(null);
  const [lines, setLines] = useState<Line[]>([]);
  const [color, setColor] = useState(COLORS.Black);
  useLayoutEffect(() => paint(sheet.current!, lines), [lines]);

  const close = () => (overlay.value = null);
  const begin = (event: PointerEvent) => {
    if (event.button !== 0 || !event.isPrimary) return;
    event.preventDefault();
    sheet.current!.setPointerCapture(event.pointerId);
    const line = { color, points: [placeOf(event)] };
    setLines((before) => [...before, line]);
  };
  const go = (event: PointerEvent) => {
    if (!event.isPrimary || !sheet.current!.hasPointerCapture(event.pointerId)) return;
    const place = placeOf(event);
    setLines((before) => before.with(-1, { color, points: [...before.at(-1)!.points, place] }));
  };
  const done = () =>
    void attempt(async () => {
      const picture = await new Promise<Blob | null>((resolve) => sheet.current!.toBlob(resolve, "image/png"));
      if (!picture) throw new Error(t("The drawing is not attached: the browser has no memory for it."));
      close();
      await attach([new File([picture], t("Drawing.png"), { type: "image/png" })]);
      focusComposer();
    });
  return (
    <Dialog title={t("Draw")} class="draw" onClose={close}>
      <div class="draw-body">
        <canvas
          ref={sheet}
          width={SIDE}
          height={SIDE}
          role="img"
          aria-label={t("The sheet: draw with a mouse, a pen or a finger")}
          onPointerDown={begin}
          onPointerMove={go}
        />
        <fieldset class="colors">
          <legend class="visually-hidden">{t("Color")}</legend>
          {Object.entries(COLORS).map(([name, value]) => (
            <label key={name} title={name}>
              <input type="radio" name="color" aria-label={name} checked={color === value} onChange={() => setColor(value)} />
              <span style={{ background: value }} />
            </label>
          ))}
        </fieldset>
        <div class="button-row">
          <button type="button" class="button" disabled={lines.length === 0} onClick={() => setLines(lines.slice(0, -1))}>
            {t("Undo")}
          </button>
          <button type="button" class="button" disabled={lines.length === 0} onClick={() => setLines([])}>
            {t("Clear")}
          </button>
          <span class="space" />
          <button type="button" class="button primary" disabled={lines.length === 0} onClick={done}>
            {t("Attach")}
          </button>
        </div>
      </div>
    </Dialog>
  );
}

/** The place of a pointer on the sheet, in the pixels of the picture. */
function placeOf(event: PointerEvent): [number, number] {
  const { left, top, width, height } = (event.currentTarget as HTMLElement).getBoundingClientRect();
  return [((event.clientX - left) / width) * SIDE, ((event.clientY - top) / height) * SIDE];
}

function paint(sheet: HTMLCanvasElement, lines: readonly Line[]): void {
  const brush = sheet.getContext("2d")!;
  brush.fillStyle = "#ffffff";
  brush.fillRect(0, 0, SIDE, SIDE);
  brush.lineWidth = WIDTH;
  brush.lineCap = brush.lineJoin = "round";
  for (const { color, points } of lines) {
    brush.strokeStyle = color;
    brush.beginPath();
    brush.moveTo(...points[0]!);
    for (const point of points) brush.lineTo(...point); // a single point becomes a dot
    brush.stroke();
  }
}
