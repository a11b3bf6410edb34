// A scrolling column that stays at its end while one is there, and stays where it is otherwise.

import type { RefObject } from "preact";
import { useLayoutEffect, useMemo } from "preact/hooks";
import { signal, type ReadonlySignal } from "@preact/signals";

/** So near to the end is at the end, in pixels. */
const NEAR = 24;

/** Follows the end of a column that grows; a scroll upwards ends that, and a scroll to the end begins it again. */
export class Follower {
  private readonly following = signal(true);
  private column: HTMLElement | null = null;
  private top = 0;

  /** True while the end is shown, and followed. */
  get atEnd(): ReadonlySignal<boolean> {
    return this.following;
  }

  /** Watch a column and what is in it; what is returned ends that. */
  watch(column: HTMLElement, content: HTMLElement): () => void {
    this.column = column;
    const onScroll = () => this.scrolled(column);
    const onWheel = (event: WheelEvent) => {
      if (event.deltaY < 0 && column.scrollTop > 0 && within(event, column)) this.following.value = false;
    };
    const sizes = new ResizeObserver(() => this.keep());
    column.addEventListener("scroll", onScroll, { passive: true });
    column.addEventListener("wheel", onWheel, { passive: true });
    sizes.observe(content);
    sizes.observe(column);
    return () => {
      column.removeEventListener("scroll", onScroll);
      column.removeEventListener("wheel", onWheel);
      sizes.disconnect();
      this.column = null;
    };
  }

  /** Go to the end, and stay there. */
  toEnd(): void {
    this.following.value = true;
    this.keep();
  }

  /** Stay where it is, also when the column grows. */
  leave(): void {
    this.following.value = false;
  }

  private keep(): void {
    if (!this.column || !this.following.peek()) return;
    this.column.scrollTop = this.column.scrollHeight;
    this.top = this.column.scrollTop;
  }

  private scrolled(column: HTMLElement): void {
    const left = column.scrollHeight - column.clientHeight - column.scrollTop;
    const upwards = column.scrollTop < this.top - 1;
    this.top = column.scrollTop;
    if (left <= 2) this.following.value = true;
    else if (upwards) this.following.value = false;
    else if (left < NEAR) this.following.value = true;
  }
}

/** True if a wheel turns the column, and not a block of code inside it that scrolls by itself. */
function within(event: WheelEvent, column: HTMLElement): boolean {
  for (let one = event.target as Element | null; one && one !== column; one = one.parentElement) {
    if (one.scrollTop > 0 && one.scrollHeight > one.clientHeight + 1) return false;
  }
  return true;
}

/** A follower of the column that both references lead to. */
export function useFollower(column: RefObject<HTMLElement | null>, content: RefObject<HTMLElement | null>): Follower {
  const follower = useMemo(() => new Follower(), []);
  useLayoutEffect(() => {
    if (!column.current || !content.current) return undefined;
    return follower.watch(column.current, content.current);
  }, [follower]);
  return follower;
}
