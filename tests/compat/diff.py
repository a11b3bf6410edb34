"""Differences of two answers to the same request, beyond ids, times and documented ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.compat.calls import Call


class _Missing:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()


@attrs.frozen
class Answer:
    """The answer of a server: the status, the type of the content, and the body."""

    status: int
    content_type: str
    body: str

    def value(self) -> Any:
        """The answer as one JSON value, with a stream put together."""
        kind = self.content_type.partition(";")[0].strip()
        if kind == "text/event-stream":
            return {"status": self.status, "stream": assemble(events_in(self.body))}
        try:
            return {"status": self.status, "body": json.loads(self.body)}
        except ValueError:
            return {"status": self.status, "text": self.body}


@attrs.frozen
class Difference:
    """One place where two answers differ."""

    path: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.path}: trioserve {_short(self.ours)}, llama-server {_short(self.theirs)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


# -- streams


def events_in(body: str) -> list[Any]:
    """Read the events of a stream as JSON, or else as text."""
    events = []
    for block in body.split("\n\n"):
        data = [line[6:] for line in block.splitlines() if line.startswith("data: ")]
        if data:
            try:
                events.append(json.loads("\n".join(data)))
            except ValueError:
                events.append("\n".join(data))
    return events


def assemble(events: Sequence[Any]) -> Any:
    """Put a stream together, so that it does not matter where it was cut into events."""
    done = bool(events) and events[-1] == "[DONE]"
    outputs: dict[str, dict[str, Any]] = {}
    rest = []
    for event in events[:-1] if done else events:
        if event is None:
            continue  # llama-server reports the start of another prompt this way
        if isinstance(event, dict) and "content" in event and "index" in event:
            _add_part(outputs.setdefault(str(event["index"]), {}), event)
        elif isinstance(event, dict) and event.get("choices"):
            (choice,) = event["choices"]
            _add_choice(outputs.setdefault(str(choice["index"]), {}), event, choice)
        else:
            rest.append(event)
    return {"done": done, "outputs": outputs, "rest": rest}


def _add_part(output: dict[str, Any], event: Mapping[str, Any]) -> None:
    """Add an event of llama-server's own routes."""
    for name in ("content", "tokens", "completion_probabilities"):
        if name in event and "prompt_progress" not in event:  # whose token is a stand-in
            output[name] = _joined(output.get(name), event[name])
    if event.get("stop") is not False:
        output["last"] = {k: v for k, v in event.items() if k not in output}
    elif "prompt_progress" in event:
        output["prompt_progress"] = event["prompt_progress"]
    else:
        names = {"tokens_predicted", "completion_probabilities"}
        output["part"] = {k: v for k, v in event.items() if k not in output and k not in names}
        _note_timings(output)


def _add_choice(
    output: dict[str, Any], event: Mapping[str, Any], choice: Mapping[str, Any]
) -> None:
    """Add a chunk of OpenAI's routes."""
    output.setdefault("first", choice.get("delta"))
    if "text" in choice:
        output["text"] = _joined(output.get("text"), choice["text"])
    for name, value in (choice.get("delta") or {}).items():
        if name == "tool_calls":
            for call in value:
                calls = output.setdefault("tool_calls", {}).setdefault(str(call["index"]), {})
                for part, text in call.get("function", {}).items():
                    calls[part] = _joined(calls.get(part), text)
        elif value is not None and name != "role":
            output[name] = _joined(output.get(name), value)
    for each in (choice.get("logprobs") or {}).get("content") or ():
        output.setdefault("logprobs", []).append(each)
    output["finish_reason"] = choice.get("finish_reason")
    shared = {k: v for k, v in event.items() if k not in ("choices", "prompt_progress")}
    if choice.get("finish_reason") is not None:
        output["last"] = shared
    elif "prompt_progress" in event:
        output["prompt_progress"] = event["prompt_progress"]
    else:
        output["part"] = shared
        _note_timings(output)


def _note_timings(output: dict[str, Any]) -> None:
    """Keep of the timings on the way only that there are any: they count the tokens so far."""
    if output["part"].pop("timings", None) is not None:
        output["has_timings_on_the_way"] = True


def _joined(a: Any, b: Any) -> Any:
    return b if a is None else a + b


# -- values


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[Difference]:
    """Find where two JSON values differ. Numbers may, by what a float rounds away."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            inner = f"{path}/{name}"
            yield from differences(ours.get(name, MISSING), theirs.get(name, MISSING), inner)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(a, b, f"{path}/{i}")
    elif not _is_equal(ours, theirs, 5e-2 if path.endswith("logprob") else 1e-3):
        yield Difference(path or "/", ours, theirs)


def _is_equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return bool(a == b)


# -- what is known


def only_ours(_ours: Any, theirs: Any) -> bool:
    """True if llama-server does not have the value at all."""
    return theirs is MISSING


def only_theirs(ours: Any, _theirs: Any) -> bool:
    """True if trioserve does not have the value at all."""
    return ours is MISSING


def same_stripped(ours: Any, theirs: Any) -> bool:
    """True if only blanks at the ends differ."""
    return isinstance(ours, str) and isinstance(theirs, str) and ours.strip() == theirs.strip()


@attrs.frozen
class Known:
    """An intended difference, and its reason.

    `kind` and `path` are regular expressions, for all of the kind of call and of the path;
    `fields` are those that the request must have, `several` says that it has more than one output;
    `when` looks at the two values.
    """

    why: str
    path: str
    kind: str = ".*"
    fields: tuple[str, ...] = ()
    several: bool = False
    when: Callable[[Any, Any], bool] | None = None

    def covers(self, call: Call, difference: Difference) -> bool:
        """True if this is the difference."""
        return (
            re.fullmatch(self.kind, call.kind) is not None
            and re.fullmatch(self.path, difference.path) is not None
            and call.has(*self.fields)
            and (not self.several or call.n_outputs > 1)
            and (self.when is None or self.when(difference.ours, difference.theirs))
        )
