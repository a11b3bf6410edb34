/** The line of a small chart. */

/** A curve from the left to the right of a box; the newest value is at the right edge. */
export function line(values: number[], slots: number, width: number, height: number): string {
  const top = Math.max(...values, 1);
  const step = width / (slots - 1);
  const start = width - (values.length - 1) * step;
  return values
    .map((value, index) => {
      const x = start + index * step;
      const y = height - (value / top) * height;
      return `${index ? "L" : "M"}${round(x)} ${round(y)}`;
    })
    .join("");
}

/** The same curve, closed along the bottom, to be filled. */
export function area(values: number[], slots: number, width: number, height: number): string {
  if (values.length === 0) return "";
  const start = width - (values.length - 1) * (width / (slots - 1));
  return `${line(values, slots, width, height)}L${round(width)} ${height}L${round(start)} ${height}Z`;
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
