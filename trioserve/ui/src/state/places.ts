// A browser opens six connections to a server at most, for all its tabs. Streams may not take all.

/** Connections of this tab that may be streams. */
const MOST = 4;

let taken = 0;
const waiting: (() => void)[] = [];

/**
 * Do something that needs a connection for long; `onWait` is called when it has to wait for one.
 * Throws what `signal` was aborted with.
 */
export async function withPlace<T>(
  work: () => Promise<T>,
  onWait: () => void,
  signal: AbortSignal,
): Promise<T> {
  if (taken >= MOST) onWait();
  while (taken >= MOST) {
    await new Promise<void>((resolve) => {
      waiting.push(resolve);
      signal.addEventListener("abort", () => resolve(), { once: true });
    });
    signal.throwIfAborted();
  }
  taken += 1;
  try {
    return await work();
  } finally {
    taken -= 1;
    for (const look of waiting.splice(0)) look();
  }
}
