"""Conversations that a template is rendered with, and what it writes for the assistant."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.chat.messages import Message, Tool

#: Renders messages with tools and variables as they are; None when the template refuses.
Probe = Callable[..., str | None]

#: Texts that templates neither strip nor escape, and which stand nowhere else.
ASKED, SAID, THOUGHT, NEXT = "Ask7x", "Said7x", "Thought7x", "Next7x"
NAMES = ("fn7x_a", "fn7x_b", "fn7x_c")
KEYS = ("key7x_a", "key7x_b", "key7x_c")
VALUES: tuple[Any, ...] = ("text7x_a", 70717, "text7x_c")
ARGUMENTS: Mapping[str, Any] = dict(zip(KEYS, VALUES, strict=True))
#: Nine letters and digits, which some templates insist on.
CALL_IDS = ("id7xaaaaa", "id7xbbbbb", "id7xccccc")


def _tool(name: str) -> Tool:
    kinds = {str: "string", int: "integer"}
    properties = {
        key: {"type": kinds[type(value)], "description": "An argument"}
        for key, value in ARGUMENTS.items()
    }
    parameters = {"type": "object", "properties": properties, "required": [KEYS[0]]}
    function = {"name": name, "description": "A tool", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = tuple(map(_tool, NAMES))


@attrs.frozen(kw_only=True)
class Answer:
    """An answer of the assistant: its text, its reasoning, and its calls by name and arguments."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


#: Longer texts are no answers, and comparing them would take long.
_MAX_WRITTEN = 2**13


class Probes:
    """Renders answers, and gives what a template writes after the question.

    Args:
        probe: renders messages as they are.
        as_objects: arguments of calls are objects, and not text.
        reason: puts reasoning into a message; None: the template shows none.
        fill: sets the variables for thinking, from `enable_thinking`.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        as_objects: bool,
        reason: Callable[[Message, str], Message] | None,
        fill: Callable[[dict[str, Any]], None],
    ) -> None:
        self._probe = probe
        self._as_objects = as_objects
        self._reason = reason
        self._fill = fill

    def written(self, answer: Answer, *, ids: Sequence[str] = CALL_IDS) -> str:
        """Give all that stands after the question; empty if the template refuses the answer."""
        return self._after([self._message(answer, ids)])

    @functools.cached_property
    def begun(self) -> frozenset[str]:
        """The beginnings of an answer in prompts: as they are, with thinking and without."""
        return frozenset(map(self.opened, (None, True, False)))

    def opened(self, thinking: bool | None) -> str:
        variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        self._fill(variables)
        return self._after([], add_generation_prompt=True, **variables)

    @functools.cached_property
    def turn_ends(self) -> tuple[str, frozenset[str]]:
        """The text that ends a conversation after an answer, and the markers that end an answer."""
        answers = Answer(content=SAID), Answer(calls=((NAMES[0], {KEYS[0]: SAID}),))
        last = _shared_end(*(self.written(one).rpartition(SAID)[2] for one in answers))
        said, called = (self._message(one, CALL_IDS) for one in answers)
        result = {"role": "tool", "tool_call_id": CALL_IDS[0], "name": NAMES[0]}
        ends = [
            frozenset(pieces(self._after(list(messages)).partition(NEXT)[0].rpartition(SAID)[2]))
            for messages in (
                (said, {"role": "user", "content": NEXT}),
                (called, {**result, "content": NEXT}),
            )
        ]
        return last, frozenset(filter(MARKER.fullmatch, ends[0] & ends[1]))

    def without_prompt(self, shown: str) -> tuple[str, str]:
        """Take what an answer shares with a prompt for it off, and give both."""
        begun = max((_shared(shown, opened) for opened in self.begun), key=len)
        return begun, shown[len(begun) :]

    def without_end(self, text: str) -> str:
        last, markers = self.turn_ends
        text = text.removesuffix(_shared_end(text, last)).rstrip()
        while (found := list(_PIECE.finditer(text))) and found[-1][0] in markers:
            text = text[: found[-1].start()].rstrip()
        return text

    def _after(
        self, answers: list[Message], *, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        shown = self._probe(
            [{"role": "user", "content": ASKED}, *answers],
            tools=list(TOOLS),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        after = (shown or "").rpartition(ASKED)[2]
        return after if len(after) <= _MAX_WRITTEN else ""

    def _message(self, answer: Answer, ids: Sequence[str]) -> Message:
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning and self._reason is not None:
            message = self._reason(message, answer.reasoning)
        calls = []
        for call_id, (name, arguments) in zip(ids, answer.calls, strict=False):
            given = dict(arguments) if self._as_objects else json.dumps(arguments)
            function = {"name": name, "arguments": given}
            calls.append({"id": call_id, "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        return message


#: A tag, possibly without its end; a word in brackets; a bracket; words.
_PIECE = re.compile(
    r"<[^<>]*>?|\[/?[A-Z][A-Z_ ]*\]|[\[\](){}]|[^\s<\[\](){}]+(?: [^\s<\[\](){}]+)*"
)
#: A tag, or a word in brackets.
MARKER = re.compile(r"<[^<>]+>|\[/?[A-Z][A-Z_ ]*\]")
_CHARACTER = re.compile(r"<[^<>]*>?|\[/?[A-Z][A-Z_ ]*\]|.", re.DOTALL)


def pieces(text: str) -> list[str]:
    """Take text apart into markers, without the whitespace between them."""
    return _PIECE.findall(text)


def _shared(one: str, other: str) -> str:
    """Give how two texts begin alike, without the beginning of a tag."""
    return "".join(shared_pieces(_CHARACTER.findall(one), _CHARACTER.findall(other)))


def _shared_end(one: str, other: str) -> str:
    return "".join(shared_last_pieces(_CHARACTER.findall(one), _CHARACTER.findall(other)))


def shared_pieces(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Give the first pieces that two lists share."""
    pairs = zip(one, other, strict=False)
    return [mine for mine, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def shared_last_pieces(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Give the last pieces that two lists share."""
    return shared_pieces(one[::-1], other[::-1])[::-1]
