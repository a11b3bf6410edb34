/** Pictures as they are sent: of a type that the server takes, and not larger than a model looks at. */

import { quoted } from "./format";
import { t } from "../words";

/** The largest picture that is sent, in pixels. Models look at less, and each message sends it again. */
export const MAX_PIXELS = 2048 * 2048;

/** The types that the server takes. The browser knows others. */
const TAKEN = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** A size within the limit, in the same proportions. */
export function fitted(width: number, height: number): [number, number] {
  const scale = Math.min(1, Math.sqrt(MAX_PIXELS / (width * height)));
  return [Math.max(1, Math.floor(width * scale)), Math.max(1, Math.floor(height * scale))];
}

/** A picture to send; throws an Error for people if the file is not a picture. */
export async function readPicture(file: File): Promise<Blob> {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(t("{name} cannot be read as a picture.", { name: quoted(file.name) }));
  });
  try {
    const [width, height] = fitted(bitmap.width, bitmap.height);
    if (width === bitmap.width && TAKEN.includes(file.type)) return file;
    const canvas = new OffscreenCanvas(width, height);
    const brush = canvas.getContext("2d")!;
    brush.imageSmoothingQuality = "high";
    brush.drawImage(bitmap, 0, 0, width, height);
    // Only a JPEG is surely a photograph, and has nothing that one can see through.
    return await canvas.convertToBlob({ type: file.type === "image/jpeg" ? file.type : "image/png", quality: 0.92 });
  } finally {
    bitmap.close();
  }
}
