import type { ComponentType, VNode } from "preact";
import { useEffect, useState } from "preact/hooks";
import { t } from "../words";

import { attempt } from "./toasts";

/** A component whose code comes when it is first shown, or when it is fetched before. */
export interface Later<Props> {
  (props: Props): VNode | null;
  fetch: () => Promise<void>;
}

/** Make such a component of what loads its code. */
export function later<Props extends object>(load: () => Promise<ComponentType<Props>>): Later<Props> {
  let loaded: ComponentType<Props> | null = null;
  const fetch = () =>
    attempt(async () => {
      loaded ??= await load().catch(() => {
        // The server is away, or was updated since the page was loaded.
        throw new Error(t("A part of the page could not be loaded. Try again, or reload the page."));
      });
    });
  function Shown(props: Props): VNode | null {
    const [Body, setBody] = useState<ComponentType<Props> | null>(() => loaded);
    useEffect(() => {
      if (!Body) void fetch().then(() => setBody(() => loaded));
    }, []);
    return Body && <Body {...props} />;
  }
  return Object.assign(Shown, { fetch });
}
