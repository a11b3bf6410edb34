// Ends waits early: the network is back, or the page is visible again.

const waiting = new Set<() => void>();

/** Call back each time; the function that is returned ends that. */
export function onWake(callback: () => void): () => void {
  waiting.add(callback);
  return () => waiting.delete(callback);
}

/** Tell all who wait. */
export function wake(): void {
  for (const callback of [...waiting]) callback();
}

/** Let the browser's events wake those who wait. */
export function listenToBrowser(): void {
  addEventListener("online", wake);
  addEventListener("pageshow", wake);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) wake();
  });
}

/**
 * Wait for some milliseconds, or until something wakes us. Throws what `signal` was aborted with.
 */
export async function pauseFor(milliseconds: number, signal?: AbortSignal): Promise<void> {
  signal?.throwIfAborted();
  await new Promise<void>((resolve) => {
    const end = () => {
      clearTimeout(timer);
      awake();
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, milliseconds);
    const awake = onWake(end);
    signal?.addEventListener("abort", end);
  });
  signal?.throwIfAborted();
}
