// The parts of a browser that the plain modules need, for tests in Node. Import it before them.

import "fake-indexeddb/auto";

const kept = new Map<string, string>();

export const localStorageFake = {
  getItem: (name: string): string | null => kept.get(name) ?? null,
  setItem: (name: string, value: string): void => void kept.set(name, value),
  clear: (): void => kept.clear(),
};

export const documentFake = {
  baseURI: "http://127.0.0.1:8080/prefix/",
  hidden: false,
  addEventListener: (): void => undefined,
};

class FileReaderFake {
  result = "";
  onload = (): void => undefined;
  onerror = (): void => undefined;

  readAsDataURL(blob: Blob): void {
    const done = (bytes: ArrayBuffer) => {
      this.result = `data:${blob.type};base64,${Buffer.from(bytes).toString("base64")}`;
      this.onload();
    };
    blob.arrayBuffer().then(done, () => this.onerror());
  }
}

Object.assign(globalThis, { document: documentFake, localStorage: localStorageFake, FileReader: FileReaderFake });

/** Let everything that is ready to run do so. */
export async function settle(turns = 20): Promise<void> {
  for (let i = 0; i < turns; i++) await new Promise((resolve) => setImmediate(resolve));
}

/** A generator of numbers from 0 to 1, the same for the same seed. */
export function randomFrom(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
