import assert from "node:assert/strict";
import { before, test } from "node:test";

import { Follower } from "./scroll";

let resized: () => void = () => undefined;

before(() => {
  Object.assign(globalThis, {
    ResizeObserver: class {
      constructor(told: () => void) {
        resized = told;
      }
      observe(): void {}
      disconnect(): void {}
    },
  });
});

/** A column of 100 pixels that scrolls as a browser's does. */
class Column extends EventTarget {
  clientHeight = 100;
  scrollHeight = 100;
  parentElement = null;
  #top = 0;

  get scrollTop(): number {
    return this.#top;
  }

  set scrollTop(top: number) {
    this.#top = Math.max(0, Math.min(top, this.scrollHeight - this.clientHeight));
  }

  grow(by: number): void {
    this.scrollHeight += by;
    this.scrollTop = this.#top;
    resized();
  }

  scroll(by: number): void {
    this.scrollTop += by;
    this.dispatchEvent(new Event("scroll"));
  }

  get left(): number {
    return this.scrollHeight - this.clientHeight - this.scrollTop;
  }
}

function watched(): { column: Column; follower: Follower; end: () => void } {
  const column = new Column();
  const follower = new Follower();
  const end = follower.watch(column as unknown as HTMLElement, {} as HTMLElement);
  return { column, follower, end };
}

test("a column that grows stays at its end", () => {
  const { column, follower } = watched();
  for (let turn = 0; turn < 5; turn += 1) {
    column.grow(70);
    assert.equal(column.left, 0);
    column.dispatchEvent(new Event("scroll"));
  }
  assert.ok(follower.atEnd.value);
});

test("a scroll upwards ends that, however short it is", () => {
  const { column, follower } = watched();
  column.grow(500);
  column.scroll(-10);
  assert.ok(!follower.atEnd.value);
  const { scrollTop } = column;
  column.grow(200);
  assert.equal(column.scrollTop, scrollTop);
});

test("a scroll to the end begins it again", () => {
  const { column, follower } = watched();
  column.grow(500);
  column.scroll(-300);
  column.scroll(100);
  assert.ok(!follower.atEnd.value);
  column.scroll(195);
  assert.ok(follower.atEnd.value);
  column.grow(50);
  assert.equal(column.left, 0);
});

test("a column that gets shorter is still at its end", () => {
  const { column, follower } = watched();
  column.grow(500);
  column.grow(-300);
  column.dispatchEvent(new Event("scroll"));
  assert.ok(follower.atEnd.value);
});

test("one can be taken to the end from anywhere", () => {
  const { column, follower } = watched();
  column.grow(500);
  column.scroll(-400);
  follower.toEnd();
  assert.equal(column.left, 0);
  assert.ok(follower.atEnd.value);
});

test("a column that is not watched any more is left alone", () => {
  const { column, end } = watched();
  column.grow(500);
  column.scroll(-400);
  end();
  column.scroll(400);
  column.grow(100);
  assert.equal(column.left, 100);
});
