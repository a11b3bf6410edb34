import type { VNode } from "preact";
import { useId } from "preact/hooks";

interface ChoiceProps<Value extends string> {
  title: string;
  value: Value;
  options: Record<Value, string>;
  onChange: (value: Value) => void;
}

/** One of a few values. */
export function Choice<Value extends string>({ title, value, options, onChange }: ChoiceProps<Value>): VNode {
  const name = useId();
  return (
    <fieldset class="choice">
      <legend>{title}</legend>
      <div class="segments">
        {(Object.entries(options) as [Value, string][]).map(([each, label]) => (
          <label key={each}>
            <input type="radio" name={name} checked={each === value} onChange={() => onChange(each)} />
            <span>{label}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}
