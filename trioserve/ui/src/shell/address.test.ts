import assert from "node:assert/strict";
import { test } from "node:test";
import { NEW, chatOf, linkTo } from "./address";

test("an address names its chat, whatever is in the id", () => {
  for (const id of ["8b1c", "a/b#c?d", "ü %"]) assert.equal(chatOf(linkTo(id)), id);
});

test("other addresses name none", () => {
  for (const hash of ["", NEW, "#/chat/", "#message", "#/chat/%E0%A4%A"]) assert.equal(chatOf(hash), null);
});
