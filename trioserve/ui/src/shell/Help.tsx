import type { VNode } from "preact";

import { settings } from "../state/settings";
import { t } from "../words";
import { Dialog } from "./Dialog";
import { type Shortcut, keyNames, shortcuts } from "./keys";
import { mac } from "./shortcuts";
import { overlay } from "./view";

/** The list of the keyboard's shortcuts. */
export function Help(): VNode {
  const enter = settings.value.sendKey === "enter";
  const sending: Pick<Shortcut, "key" | "mod" | "shift" | "says">[] = [
    { key: "Enter", mod: !enter, says: "Send the message" },
    { key: "Enter", shift: enter, says: "New line" },
    { key: "ArrowUp", says: "Edit your last message, while the field is empty" },
  ];
  const inTheList: typeof sending = [
    { key: "F2", says: "Rename the chat, in the list" },
    { key: "Delete", says: "Delete the chat, in the list" },
  ];
  return (
    <Dialog title={t("Keyboard shortcuts")} class="help" onClose={() => (overlay.value = null)}>
      <dl class="keys">
        {[...sending, ...shortcuts, ...inTheList].map((one) => (
          <div key={one.says}>
            <dt>{t(one.says)}</dt>
            <dd>
              {keyNames(one, mac).map((name) => (
                <kbd key={name}>{name}</kbd>
              ))}
            </dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
