import type { ComponentType, VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { attempt } from "./toasts";

/** A component whose code is fetched when it is first shown. */
export function later<Props extends object>(
  load: () => Promise<ComponentType<Props>>,
): (props: Props) => VNode | null {
  let loaded: ComponentType<Props> | null = null;
  return function Later(props) {
    const [Body, setBody] = useState<ComponentType<Props> | null>(() => loaded);
    useEffect(() => {
      if (Body) return;
      void attempt(async () => {
        loaded = await load();
        setBody(() => loaded);
      });
    }, []);
    return Body && <Body {...props} />;
  };
}
