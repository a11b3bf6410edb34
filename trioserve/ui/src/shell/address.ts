/** The open chat in the address of the page. */

const PREFIX = "#/chat/";

/** The address of no chat: one is about to begin. */
export const NEW = "#/";

/** The address of a chat. */
export function linkTo(chat: string): string {
  return PREFIX + encodeURIComponent(chat);
}

/** The chat that an address names, if it names one. */
export function chatOf(hash: string): string | null {
  if (!hash.startsWith(PREFIX)) return null;
  try {
    return decodeURIComponent(hash.slice(PREFIX.length)) || null;
  } catch (error) {
    if (error instanceof URIError) return null;
    throw error;
  }
}
