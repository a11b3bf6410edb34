"""Comparisons of what a template writes: each finds one part of a format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from trioserve.chat.derive.probes import (
    ARGUMENTS,
    CALL_IDS,
    KEYS,
    MARKER,
    NAMES,
    SAID,
    THOUGHT,
    VALUES,
    Answer,
    Probes,
    pieces,
    shared_last_pieces,
    shared_pieces,
)
from trioserve.chat.formats.syntax import (
    Choice,
    Ignore,
    JsonArguments,
    JsonCall,
    Literals,
    Marker,
    Maybe,
    Name,
    Parameters,
    QuotedName,
    Reasoning,
    Step,
    ToolCalls,
)

# -- reasoning

_END_IN_SOURCE = re.compile(r"</[\w:]{0,40}think[\w:]{0,40}>|\[/THINK\]")


def reasoning_written(probes: Probes) -> Reasoning | None:
    """An answer with reasoning: the markers before and after it."""
    calls = ((NAMES[0], ARGUMENTS),)
    for answer in (
        Answer(content=SAID, reasoning=THOUGHT),
        Answer(reasoning=THOUGHT, calls=calls),
    ):
        before, thought, after = probes.written(answer).partition(THOUGHT)
        start, end = pieces(before)[-1:], pieces(after)[:1]
        if thought and start and end and all(map(MARKER.fullmatch, (*start, *end))):
            return Reasoning(start[0], end[0])
    return None


def reasoning_switched(probes: Probes) -> Reasoning | None:
    """Prompts with thinking on and off: the latter begins and ends the reasoning, or ends it."""
    found = pieces(probes.opened(False))
    if pieces(probes.opened(True)) == found:
        return None
    match found[-2:]:
        case [start, end] if start == end.replace("</", "<", 1) != end:
            return Reasoning(start, end)
        case [*_, end] if end.startswith("</"):
            return Reasoning(end.replace("</", "<", 1), end)
    return None


def reasoning_mentioned(source: str) -> Reasoning | None:
    """The source of the template: the end of reasoning, which many take out of earlier answers."""
    if (found := _END_IN_SOURCE.search(source)) is None:
        return None
    return Reasoning(found[0].replace("/", "", 1), found[0])


# -- calls


@attrs.frozen(kw_only=True)
class _Core:
    """A call without the markers around it. With `name_first` its name comes before all else."""

    start: int
    end: int
    steps: tuple[Step, ...]
    name_first: bool = True


def call_as_json(shown: str, name: str, at: int) -> _Core | None:
    """The name is in a JSON object, with the arguments: which members are which."""
    for start in _places(shown, "{", 0, shown.find(name, at)):
        value, end = _json_at(shown, start)
        if not isinstance(value, dict) or name not in shown[start:end]:
            continue
        if list(value) == [name] and value[name] == ARGUMENTS:
            steps = (Marker("{"), QuotedName(), Marker(":"), JsonArguments(), Marker("}"))
            return _Core(start=start, end=end, steps=steps, name_first=False)
        by_value = {
            part: tuple(key for key, one in value.items() if fits(one))
            for part, fits in (("name", lambda one: one == name), ("arguments", _are_arguments))
        }
        if by_value["name"] and by_value["arguments"]:
            others = [key for key in value if (key,) not in by_value.values()]
            step = JsonCall(
                name_keys=by_value["name"],
                arguments_keys=by_value["arguments"],
                ignored_keys=tuple(dict.fromkeys(("type", "id", *others))),
            )
            return _Core(start=start, end=end, steps=(step,), name_first=False)
    return None


def arguments_as_json(shown: str, name: str, at: int) -> _Core | None:
    """The arguments are a JSON object behind the name: what stands between."""
    start = shown.find(name, at)
    behind = start + len(name)
    for place in _places(shown, "{", behind, shown.find(KEYS[0], behind)):
        value, end = _json_at(shown, place)
        if value == ARGUMENTS:
            steps = (*_named(shown[behind:place], "{"), JsonArguments())
            return _Core(start=start, end=end, steps=steps)
    return None


def arguments_as_literals(shown: str, name: str, at: int) -> _Core | None:
    """Keys, equals signs and values stand in brackets: the signs and quotes."""
    start = shown.find(name, at)
    found = re.match(
        rf"\s*([({{])\s*{KEYS[0]}(?P<equals>\s*[=:]\s*)(?P<quote>\S+?){VALUES[0]}(?P=quote)\s*,"
        rf"\s*{KEYS[1]}(?P=equals){VALUES[1]}\s*,"
        rf"\s*{KEYS[2]}(?P=equals)(?P=quote){VALUES[2]}(?P=quote)\s*([)}}])",
        shown[start + len(name) :],
    )
    if found is None:
        return None
    opened, equals, quote, closed = found.groups()
    is_python = quote in ("'", '"')
    step = Literals(
        open=opened,
        equals=equals.strip(),
        close=closed,
        quotes=('"', "'") if is_python else (quote,),
        escapes=is_python,
    )
    steps = (Name(until=(opened,)), step)
    end = start + len(name) + found.end()
    return _Core(start=start, end=end, steps=steps)


def arguments_in_markers(shown: str, name: str, at: int) -> _Core | None:
    """Each key and value stands between markers: the same for every argument."""
    start = shown.find(name, at)
    gaps = _gaps(shown, start + len(name))
    if gaps is None:
        return None
    before, (to_value, between, to_number, _, _), after, end = gaps
    is_json = to_value == f'{to_number}"' and between[:1] == after[:1] == '"'
    if is_json:
        to_value, between, after, end = to_number, between[1:], after[1:], end + 1
    closed = shared_pieces(pieces(between), pieces(after))
    opened = shared_last_pieces(pieces(between), pieces(before))
    if not opened or [*closed, *opened] != pieces(between):
        return None
    close = between[: between.find(opened[0], len(closed[0]))].strip() if closed else ""
    open = between.strip().removeprefix(close).strip()
    markers = _value_markers(to_value, to_number)
    if not close or "\n" in open or markers is None:
        return None
    ends = tuple(pieces(after)[len(closed) :][:2])
    key_end, value_open, attribute = markers
    step = Parameters(
        open=open,
        key_end=key_end,
        close=close,
        ends=ends,
        value_open=value_open,
        text_attribute=attribute,
        newlines=to_value.endswith("\n") and between.startswith("\n"),
        is_json=is_json,
    )
    name_end = pieces(before)[: -len(opened)]
    named = (
        _named(before[: before.find(opened[0])], "")
        if name_end
        else (Name(until=(open, *ends[:1], "{")),)
    )
    end = end + after.find(close) + len(close)
    either = Choice("{", (JsonArguments(),), (step,), writes_others=True)
    return _Core(start=start, end=end, steps=(*named, either))


CALLS = (call_as_json, arguments_as_json, arguments_as_literals, arguments_in_markers)


def _places(text: str, part: str, start: int, stop: int) -> Iterator[int]:
    return (found.start() + start for found in re.finditer(re.escape(part), text[start:stop]))


def _json_at(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _are_arguments(value: Any) -> bool:
    if isinstance(value, str) and value.startswith("{"):
        value = _json_at(value, 0)[0]
    return bool(value == ARGUMENTS)


def _named(gap: str, then: str) -> tuple[Step, ...]:
    """Give the step for a name and those for the text behind it, which may have the call's id."""
    found = pieces(gap)
    if not found:
        return (Name(until=("\n",) if "\n" in gap else (then,)),)
    if re.fullmatch(r":[0-9]+", found[0]):
        return (Name(until=tuple(found[1:2]), counted=True), *map(Marker, found[1:]))
    if until := tuple(one for one in found if one != _ID if _ID in found):
        return (Name(until=until), Ignore(until=until[-1:]), Marker(until[-1]))
    first = "\n" if "\n" in gap[: gap.find(found[0])] else found[0]
    return (Name(until=(first,)), *map(Marker, found))


def _gaps(shown: str, at: int) -> tuple[str, list[str], str, int] | None:
    """Give what stands before the first key, between keys and values, and behind the last value."""
    gaps = []
    for text in (text for pair in ARGUMENTS.items() for text in pair):
        place = shown.find(str(text), at)
        if place < 0:
            return None
        gaps.append(shown[at:place])
        at = place + len(str(text))
    return gaps[0], gaps[1:], shown[at:], at


def _value_markers(to_text: str, to_number: str) -> tuple[str, str, str] | None:
    """Give what ends a key, what begins a value, and the attribute of a value that is text."""
    found = pieces(to_text)
    if to_text == to_number:
        return (*found, "", "")[:3] if len(found) in (1, 2) else None  # type: ignore[return-value]
    pattern = re.compile(r"\s*(\S+?)\s+([\w-]+=\"\w+\")\s*(\S+?)\s*")
    of_text, of_number = pattern.fullmatch(to_text), pattern.fullmatch(to_number)
    if of_text is None or of_number is None or of_text[1] != of_number[1]:
        return None
    return of_text[1], of_text[3], of_text[2]


#: Stands for the id of a call.
_ID = "\ufffc"


# -- groups of calls


def find_calls(probes: Probes, reasoning: Reasoning | None) -> tuple[str, ToolCalls] | None:
    """Compare answers with a call, with text before it, and with two calls.

    Gives the name of the comparison that found the call, too.
    """
    call, other = (NAMES[0], ARGUMENTS), (NAMES[1], ARGUMENTS)
    one = _calls_of(probes, Answer(calls=(call,)), reasoning)
    two = _calls_of(probes, Answer(calls=(call, other)), reasoning)
    said = _calls_of(probes, Answer(content=SAID, calls=(call,)), reasoning).rpartition(SAID)[2]
    for compare in CALLS:
        if NAMES[0] not in one or (core := compare(one, NAMES[0], 0)) is None:
            continue
        before, after = pieces(one[: core.start]), pieces(one[core.end :])
        if NAMES[0] in said and (again := compare(said, NAMES[0], 0)) is not None:
            before = shared_last_pieces(before, pieces(said[: again.start]))
        gap = None
        if NAMES[1] in two and (first := compare(two, NAMES[0], 0)) is not None:
            second = compare(two, NAMES[1], first.end)
            gap = None if second is None else pieces(two[first.end : second.start])
        return compare.__name__, _grouped(core, before, gap, after)
    return None


def _calls_of(probes: Probes, answer: Answer, reasoning: Reasoning | None) -> str:
    """Give an answer from its reasoning on, with a sign for ids."""
    text = probes.without_end(probes.without_prompt(probes.written(answer))[1])
    for call_id in CALL_IDS:
        text = text.replace(call_id, _ID)
    return text if reasoning is None else text.rpartition(reasoning.end)[2]


_OBJECT = JsonCall(arguments_keys=("arguments", "parameters"), ignored_keys=("type", "id"))


def _grouped(
    core: _Core, before: Sequence[str], gap: Sequence[str] | None, after: Sequence[str]
) -> ToolCalls:
    """Tell what is around each call from what is around all; `gap` is None if one is the most."""
    n_end = 0 if gap is None else len(shared_pieces(gap, after))
    n_start = 0 if gap is None else len(shared_last_pieces(gap[n_end:], before))
    between = () if gap is None else tuple(gap[n_end : len(gap) - n_start])
    whole, own = before[: len(before) - n_start], before[len(before) - n_start :]
    end, closing = after[:n_end], after[n_end:]
    has_groups = bool(whole)
    if not has_groups:  # each call is a group
        # Many models leave the outer markers of a group out.
        split = core.name_first and len(own) > 1 and own[1].startswith("<")
        whole, own = (own[:1], own[1:]) if split else (own, own[:0])
        end, closing = (after[:-1], after[-1:]) if split else (after[:0], after)
    again = tuple(own[:1])
    starts = (*whole[:1], *again)
    if has_groups and gap == []:  # nothing but whitespace stands between calls
        again = ("",) if core.name_first else ("{",)
    bare = ""
    opening = whole[1:]
    if not whole or whole[0] in "[({":
        bare, starts, opening = (whole or "{")[0], (), whole
    call: tuple[Step, ...] = (*_markers(own), *core.steps, *(Maybe((one,)) for one in end))
    if core.name_first and not bare:  # models write objects between markers of any kind
        call = (Choice("{", (_OBJECT,), call, writes_others=True),)
    return ToolCalls(
        bare=bare,
        starts=starts,
        opening=_markers(opening),
        call=call,
        between=between,
        again=again,
        closing=tuple(closing),
    )


def _markers(found: Sequence[str]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for i, one in enumerate(found):
        until = tuple(found[i + 1 : i + 2])
        steps.append(Ignore(until=until) if one == _ID else Marker(one))
    return tuple(steps)


# -- what is around content


def content_wrapped(probes: Probes, reasoning: Reasoning | None) -> tuple[str, ...]:
    """An answer of text: the markers around it that are around no call."""
    text = probes.without_prompt(probes.written(Answer(content=SAID, reasoning=THOUGHT)))[1]
    before, said, after = text.partition(SAID)
    if not said:
        return ()
    if reasoning is not None:
        before = before.rpartition(reasoning.end)[2]
    ends = {one.replace("<", "</", 1) for one in pieces(before)}
    found = (*pieces(before), *pieces(probes.without_end(after)), *ends.intersection(pieces(after)))
    return tuple(dict.fromkeys(one for one in found if MARKER.fullmatch(one)))


def short_ids(probes: Probes) -> bool:
    """Calls with ids as clients make them: the template refuses those."""
    answer = Answer(calls=((NAMES[0], ARGUMENTS),))
    return NAMES[0] not in probes.written(answer, ids=("call_" + 24 * "a",))
