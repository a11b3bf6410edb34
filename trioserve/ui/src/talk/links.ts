// The addresses in a message that may be opened, and their shown text.

import { decode } from "./entities";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** An address that a click may open. */
export interface Address {
  href: string;
  /** Its destination, for a person: the host, or the address of the mail. */
  place: string;
}

/** An address as a browser understands it; null: one that is not opened. */
export function address(written: string): Address | null {
  let url: URL;
  try {
    url = new URL(decode(written));
  } catch {
    return null; // no address, or one that depends on where the page is
  }
  if (!SCHEMES.has(url.protocol)) return null;
  const place = url.protocol === "mailto:" ? url.pathname : url.host;
  return { href: url.href, place };
}

/** True if a text looks like another address than that of the link. */
export function misleads(text: string, { href, place }: Address): boolean {
  const shown = withoutDirections(text).replaceAll(/[\p{Cf}\s]/gu, "");
  const host = /^(?:[a-z][a-z\d+.-]*:(?:\/\/)?)?(?:[^/?#]*@)?((?:[^/?#@:.]+\.)+[^/?#@:.\d]{2,})/iu.exec(shown)?.[1];
  if (host === undefined) return false;
  if (href.startsWith("mailto:")) return withoutDirections(text).trim().toLowerCase() !== place.toLowerCase();
  const bare = (name: string) => name.toLowerCase().replace(/^www\./, "").replace(/:\d+$/, "");
  return bare(host) !== bare(place);
}

/** Characters that change the direction of the text around them. */
const DIRECTIONS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Without characters that make text look other than it is. */
export function withoutDirections(text: string): string {
  return text.replace(DIRECTIONS, "");
}

/** With such characters made visible, as in code, where they hide what it does. */
export function revealed(code: string): string {
  return code.replace(DIRECTIONS, (one) => `\u27e8U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}
