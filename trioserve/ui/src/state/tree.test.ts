import assert from "node:assert/strict";
import { test } from "node:test";

import { randomFrom } from "../testing/browser";
import { messageFor } from "../testing/messages";
import { branchesOf, childrenOf, leafOf, pathTo, subtreeOf, timeFor, treeOf } from "./tree";

/** Trees of any form, with times that are not in the order of the messages. */
function trees(): Map<string, ReturnType<typeof messageFor>>[] {
  return Array.from({ length: 60 }, (_, seed) => {
    const random = randomFrom(seed);
    const messages = Array.from({ length: Math.floor(random() * 40) }, (_, i) => {
      const before = Math.floor(random() * (i + 1)) - 1;
      const createdAt = Math.floor(random() * 20);
      return messageFor({ id: `m${i}`, parent: before < 0 ? null : `m${before}`, createdAt });
    });
    return treeOf(messages.sort(() => random() - 0.5));
  });
}

test("a path leads from a first message to the leaf, each the parent of the next", () => {
  for (const tree of trees()) {
    for (const id of tree.keys()) {
      const path = pathTo(tree, id);
      assert.equal(path[0]!.parent, null);
      assert.equal(path[path.length - 1]!.id, id);
      path.slice(1).forEach((message, i) => assert.equal(message.parent, path[i]!.id));
    }
  }
});

test("branches are all siblings of a message, oldest first, and say which it is", () => {
  for (const tree of trees()) {
    for (const id of tree.keys()) {
      const path = pathTo(tree, id);
      const branches = branchesOf(tree, path);
      for (const message of path) {
        const siblings = childrenOf(tree, message.parent);
        const found = branches.get(message.id);
        if (siblings.length < 2) assert.equal(found, undefined);
        else assert.deepEqual(found, { index: siblings.indexOf(message), ids: siblings.map((one) => one.id) });
        const times = siblings.map((one) => one.createdAt);
        assert.deepEqual(times, [...times].sort((a, b) => a - b));
      }
    }
  }
});

test("the leaf of a message lies under it, has no children, and is by the youngest each time", () => {
  for (const tree of trees()) {
    for (const id of tree.keys()) {
      const leaf = leafOf(tree, id);
      assert.equal(childrenOf(tree, leaf).length, 0);
      const path = pathTo(tree, leaf);
      const from = path.findIndex((message) => message.id === id);
      assert.ok(from >= 0);
      for (const message of path.slice(from + 1)) {
        assert.equal(childrenOf(tree, message.parent).pop(), message);
      }
    }
  }
});

test("a subtree is all whose path has the message", () => {
  for (const tree of trees()) {
    for (const id of tree.keys()) {
      const wanted = [...tree.keys()].filter((one) => pathTo(tree, one).some((each) => each.id === id));
      assert.deepEqual(subtreeOf(tree, id).map((one) => one.id).sort(), wanted.sort());
    }
  }
});

test("a new child is younger than its siblings even if the clock went back", () => {
  const tree = treeOf([messageFor({ id: "a", parent: null, createdAt: 5_000 })]);
  assert.equal(timeFor(tree, null, 9_000), 9_000);
  assert.equal(timeFor(tree, null, 1_000), 5_001);
  assert.equal(timeFor(tree, "a", 1_000), 1_000);
});

test("a damaged tree is shown as far as it goes", () => {
  const circle = treeOf([
    messageFor({ id: "a", parent: "b" }),
    messageFor({ id: "b", parent: "a" }),
  ]);
  assert.equal(pathTo(circle, "a").length, 2);
  assert.ok(circle.has(leafOf(circle, "a")));
  assert.equal(subtreeOf(circle, "a").length, 2);
  const orphan = treeOf([messageFor({ id: "c", parent: "gone" })]);
  assert.deepEqual(pathTo(orphan, "c").map((one) => one.id), ["c"]);
  assert.deepEqual(pathTo(orphan, "nowhere"), []);
});
