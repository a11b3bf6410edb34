// The parts of a browser that the frame needs in tests, beside `browser.ts`. Import it before the frame's modules.

import "./browser";

const kept = new Map<string, string>();

export const sessionStorageFake = {
  getItem: (name: string): string | null => kept.get(name) ?? null,
  setItem: (name: string, value: string): void => void kept.set(name, value),
};

Object.assign(globalThis, {
  sessionStorage: sessionStorageFake,
  matchMedia: () => ({ matches: true, addEventListener: () => undefined }),
});
