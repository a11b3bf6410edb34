import type { RefObject } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

/** A ref whose element gets the focus when it appears, if `wanted`. */
export function useFocus<Type extends HTMLElement>(wanted = true): RefObject<Type | null> {
  const element = useRef<Type>(null);
  useLayoutEffect(() => {
    if (wanted) element.current?.focus();
  }, []);
  return element;
}
