/** The KV cache drawn as blocks: each for a slot, kept, or free. */

/** The content of a block: tokens of the slot with that id, tokens kept for later prompts, or nothing. */
export type Block = number | "kept" | "free";

/** Tokens that a running slot holds. */
export interface Share {
  slot: number;
  tokens: number;
}

/**
 * Give each of `blocks` blocks an owner, slots first, in their order.
 *
 * Slots can share what they have in common, so that together they may claim more than is used:
 * then each has its part of what is. A slot with tokens has a block while there are enough.
 */
export function allot(blocks: number, used: number, total: number, shares: Share[]): Block[] {
  const claims = shares.filter((share) => share.tokens > 0);
  const claimed = claims.reduce((sum, share) => sum + share.tokens, 0);
  const fit = claimed > used ? used / claimed : 1;
  const owned: Block[] = [];
  let taken = 0;
  for (const share of claims) {
    taken += share.tokens * fit;
    const end = Math.round((taken / total) * blocks);
    for (let n = Math.max(end - owned.length, 1); n > 0; n--) owned.push(share.slot);
  }
  const filled = Math.max(Math.round((used / total) * blocks), used > taken ? owned.length + 1 : 0);
  while (owned.length < filled) owned.push("kept");
  while (owned.length < blocks) owned.push("free");
  return owned.slice(0, blocks);
}
