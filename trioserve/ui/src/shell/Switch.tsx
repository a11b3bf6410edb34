import type { VNode } from "preact";
import { useId } from "preact/hooks";

interface SwitchProps {
  label: string;
  help: string;
  value: boolean;
  onChange: (value: boolean) => void;
}

/** Something that is on or off. */
export function Switch({ label, help, value, onChange }: SwitchProps): VNode {
  const id = useId();
  return (
    <div class="switch-row">
      <label for={id}>{label}</label>
      <input
        id={id}
        type="checkbox"
        role="switch"
        class="switch"
        checked={value}
        aria-describedby={`${id}-help`}
        onChange={(event) => onChange(event.currentTarget.checked)}
      />
      <p id={`${id}-help`} class="hint">
        {help}
      </p>
    </div>
  );
}
