// Code that is better looked at than read: drawings, diagrams and pages.

export type PictureKind = "svg" | "mermaid" | "html";

/** A longer text stays code. */
const MAX = 200_000;
// In each of these, at most one way to match: a model must not write a text that a browser takes minutes to look through.
const SVG = /^\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<svg[\s>]/is;

/** The picture or page of a block of code; null: text alone. */
export function pictureKind(language: string, text: string): PictureKind | null {
  if (text.length > MAX || text.trim() === "") return null;
  if (language === "mermaid") return "mermaid";
  if (/^(?:svg|xml|html)?$/.test(language) && SVG.test(text)) return isHeavy(text) ? null : "svg";
  return language === "html" ? "html" : null;
}

/** The most elements that a drawing may have, and the most filters: tens of thousands keep a browser busy for seconds. */
const MAX_ELEMENTS = 50_000;
const MAX_FILTERS = 40;

/** True if it would take a browser long to draw. Each reuse of a part may contain others, and so multiply. */
function isHeavy(svg: string): boolean {
  const count = (what: RegExp, where = svg) => where.match(what)?.length ?? 0;
  if (count(/<!entity|data:image\/svg/gi) > 0 || count(/<(?:[^\s<>:]+:)?fe[A-Z]/g) > MAX_FILTERS) return true;
  const reuses = 3 ** (count(/<(?:[^\s<>:]+:)?use\b/g) / 3) * named(svg, count(/<(?:[^\s<>:]+:)?(?:mask|pattern|clippath|marker)\b/gi));
  // A marker is drawn at each point of a path.
  const markers = Array.from(svg.matchAll(/<\/?(?:[^\s<>:]+:)?marker\b/gi), ({ index }) => index);
  const ofMarkers = markers.length ? count(/<\w/g, svg.slice(markers[0], markers.at(-1))) * count(/\d/g) : 0;
  return Math.max(count(/<\w/g) * reuses, ofMarkers) > MAX_ELEMENTS;
}

const GRADIENT = /<(?:linear|radial)gradient\b[^<>]{0,999}?\bid\s*=\s*["']([^"']{0,99})["']/gi;
const NAME = /url\(\s*["']?#([^"')]{0,99})/gi;

/** The limit of how often masks, patterns and the like are drawn if they name one another. */
function named(svg: string, parts: number): number {
  if (parts === 0) return 1;
  if (/&#|\\|<style/i.test(svg)) return Infinity; // it may name them in other ways, or for many elements at once
  const gradients = new Set(Array.from(svg.matchAll(GRADIENT), ([, id]) => id));
  const names = Array.from(svg.matchAll(NAME)).filter(([, id]) => !gradients.has(id)).length;
  return Math.max(1, names / parts) ** parts;
}

/** A drawing as a file. In one, the browser runs no script and loads nothing. */
export function svgFile(text: string): Blob {
  const bare = text.replace(/^\s*<\?xml[^>]*>/, ""); // it might name another encoding
  const [tag] = /<svg[^>]*/i.exec(bare) ?? [""];
  const named = /\sxmlns\s*=/i.test(tag) ? bare : bare.replace(/<svg/i, '<svg xmlns="http://www.w3.org/2000/svg"');
  return new Blob([named.trim()], { type: "image/svg+xml;charset=utf-8" });
}
