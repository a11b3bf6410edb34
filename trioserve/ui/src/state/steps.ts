// The calls that the server makes for a model, as the events of an answer tell of them.

import type { CallState, MadeCall, Phase, Step } from "../types";

type Event = Record<string, unknown>;

/** Characters of the output of a call that are kept while it runs. */
const OUTPUT_KEPT = 32_768;

/** The last step with one more call. */
export function withCall(steps: readonly Step[], event: Event): readonly Step[] {
  const name = textIn(event.tool);
  const call: MadeCall = {
    id: textIn(event.call_id),
    name,
    title: textIn(event.display_name) || name,
    arguments: textIn(event.arguments),
    writes: event.writes === true,
    state: "called",
  };
  return changed(steps, (step) => ({ ...step, calls: [...step.calls, call] }));
}

/** The last step with more of its text, which came after its first call. */
export function withText(steps: readonly Step[], content: string, reasoning: string): readonly Step[] {
  return changed(steps, (step) => ({
    ...step,
    content: step.content + content,
    reasoning: step.reasoning + reasoning,
  }));
}

/** The last step as an event changes the call that it names. */
export function withChange(steps: readonly Step[], event: Event): readonly Step[] {
  const how = changes[textIn(event.type)];
  if (!how) return steps; // of a later version
  const change = (call: MadeCall) => (call.id === event.call_id ? { ...call, ...how(call, event) } : call);
  return changed(steps, (step) => ({ ...step, calls: step.calls.map(change) }));
}

const changes: Record<string, (call: MadeCall, event: Event) => Partial<MadeCall>> = {
  approval: (_, event) => ({ state: "asked", ...optional("preview", event.preview) }),
  approved: () => ({ state: "called" }),
  denied: () => ({ state: "denied" }),
  started: () => ({ state: "running" }),
  output: ({ output = "" }, event) => ({ output: (output + textIn(event.text)).slice(-OUTPUT_KEPT) }),
  result: ({ state }, event) => ({
    state: endOf(state, event),
    result: textIn(event.content),
    output: "", // it is in the result
    ...optional("diff", event.diff),
    ...(typeof event.seconds === "number" ? { seconds: event.seconds } : {}),
  }),
};

function endOf(before: CallState, { stopped, is_error: isError }: Event): CallState {
  if (before === "denied") return "denied";
  if (stopped === true) return "stopped";
  return isError === true ? "failed" : "done";
}

/** The phase of the last step's calls: those that wait for a person come first. */
export function lastIsAt(steps: readonly Step[]): { phase: Phase; note: string | undefined } {
  const calls = steps.at(-1)?.calls ?? [];
  const titles = (...states: CallState[]) =>
    calls.filter(({ state }) => states.includes(state)).map(({ title }) => title).join(", ");
  const asked = titles("asked");
  const running = titles("running", "called");
  if (asked) return { phase: "asking", note: asked };
  return running ? { phase: "running-tools", note: running } : { phase: "prompt", note: undefined };
}

/** The calls that wait for a person. */
export function askedIn(steps: readonly Step[] = []): MadeCall[] {
  return steps.at(-1)?.calls.filter(({ state }) => state === "asked") ?? [];
}

/** The length of the text in steps. */
export function lengthOf(steps: readonly Step[] = []): number {
  const inCall = ({ result = "", output = "", diff = "", arguments: written }: MadeCall) =>
    result.length + output.length + diff.length + written.length;
  return steps.flatMap(({ calls }) => calls.map(inCall)).reduce((sum, one) => sum + one, 0);
}

function changed(steps: readonly Step[], how: (last: Step) => Step): readonly Step[] {
  const last = steps.at(-1);
  return last ? [...steps.slice(0, -1), how(last)] : steps;
}

function optional<Name extends string>(name: Name, value: unknown): { [key in Name]?: string } {
  return (typeof value === "string" && value ? { [name]: value } : {}) as { [key in Name]?: string };
}

function textIn(value: unknown): string {
  return typeof value === "string" ? value : "";
}
