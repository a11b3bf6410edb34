// A chat's messages form a tree: each answer to the same question, and each version of a question,
// is a separate branch. Plain functions of the messages.

import type { Message } from "../types";

export type Branches = Map<string, { index: number; ids: string[] }>;

/** The messages of a chat by their ids. */
export type Tree = ReadonlyMap<string, Message>;

export function treeOf(messages: Iterable<Message>): Map<string, Message> {
  return new Map(Array.from(messages, (message) => [message.id, message]));
}

/** The messages from the first to this one. */
export function pathTo(tree: Tree, leaf: string | null): Message[] {
  const path: Message[] = [];
  const seen = new Set<string>(); // a damaged database may have a circle
  for (let id = leaf; id !== null && !seen.has(id); ) {
    const message = tree.get(id);
    if (!message) break;
    seen.add(id);
    path.push(message);
    id = message.parent;
  }
  return path.reverse();
}

/** The messages with this parent, oldest first. */
export function childrenOf(tree: Tree, parent: string | null): Message[] {
  return [...tree.values()].filter((message) => message.parent === parent).sort(byAge);
}

/** For each message of a path that has siblings: all of them, and which it is. */
export function branchesOf(tree: Tree, path: readonly Message[]): Branches {
  const siblings = new Map<string | null, Message[]>(path.map((message) => [message.parent, []]));
  for (const message of tree.values()) siblings.get(message.parent)?.push(message);
  const branches: Branches = new Map();
  for (const message of path) {
    const all = siblings.get(message.parent)!;
    if (all.length < 2) continue;
    const ids = all.sort(byAge).map((one) => one.id);
    branches.set(message.id, { index: ids.indexOf(message.id), ids });
  }
  return branches;
}

/** The end of a message's branch: by the youngest child, and its youngest child, and so on. */
export function leafOf(tree: Tree, id: string): string {
  const youngest = new Map<string | null, Message>();
  for (const message of tree.values()) {
    const other = youngest.get(message.parent);
    if (!other || byAge(other, message) < 0) youngest.set(message.parent, message);
  }
  const seen = new Set<string>();
  let leaf = id;
  for (let next = youngest.get(leaf); next && !seen.has(leaf); next = youngest.get(leaf)) {
    seen.add(leaf);
    leaf = next.id;
  }
  return leaf;
}

/** A message and all that follow it, on all branches. */
export function subtreeOf(tree: Tree, id: string): Message[] {
  const children = new Map<string | null, Message[]>();
  for (const message of tree.values()) {
    const siblings = children.get(message.parent) ?? [];
    siblings.push(message);
    children.set(message.parent, siblings);
  }
  const root = tree.get(id);
  const all = new Set(root ? [root] : []);
  for (const message of all) {
    for (const child of children.get(message.id) ?? []) all.add(child); // which are looked at in turn
  }
  return [...all];
}

/** A time for a new child: now, and later than its siblings, whatever the clock says. */
export function timeFor(tree: Tree, parent: string | null, now = Date.now()): number {
  const siblings = childrenOf(tree, parent);
  const last = siblings[siblings.length - 1];
  return last ? Math.max(now, last.createdAt + 1) : now;
}

function byAge(a: Message, b: Message): number {
  return a.createdAt - b.createdAt || (a.id < b.id ? -1 : 1);
}
