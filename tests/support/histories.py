"""Histories of tool calls, and what a chat template writes for them, as its model would."""

# ruff: noqa: RUF001 - one of these markers has wide bars on purpose

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tests.support.message_writers import Call
from tests.support.parsing import parse
from trioserve.chat.deltas import Message
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import TrioServeError

ASKED = "Ask0"
SAID = "Said0, then."
THOUGHT = "Thought0; so."

#: Markers after calls that end a turn, and so are no text that a server sees.
_ENDS = ("<|eom_id|>", "<|tool_response>", "<SPECIAL_12>\n", "<｜hy_eos:opensource｜>")


def tool(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    kinds = {"text": "string", "note": "string", "count": "integer", "rate": "number"}
    kinds |= {"flag": "boolean", "rest": "object", "items": "array"}
    properties: dict[str, Any] = {
        key: {"type": kinds[key], "description": "Something"} for key in arguments
    }
    for key in properties.keys() & {"rest"}:
        properties[key]["additionalProperties"] = True
    parameters = {"type": "object", "properties": properties, "required": []}
    # One family of templates reads this field without a question.
    parameters["additionalProperties"] = False
    function = {"name": name, "description": "Does it", "parameters": parameters}
    return {"type": "function", "function": function}


KEYS = ("text", "note", "count", "rate", "flag", "rest", "items")
TOOLS = [tool("get_weather", KEYS), tool("search", KEYS), tool("now", ())]

_CALLS: tuple[tuple[Call, ...], ...] = (
    (("get_weather", {"text": "Oslo"}),),
    (("now", {}),),
    (("get_weather", {"text": "Oslo (Å)", "count": 3, "rate": -0.5, "flag": True}),),
    (("get_weather", {"text": "a\nb\n\nc", "note": 'He said "no", it\'s \\n {not} [so] <b>.'}),),
    (("search", {"text": "12", "note": "true"}),),
    (("search", {"text": "", "note": "{}"}),),
    (("search", {"rest": {"a": [1, "b", {"c": "d"}], "e": "f"}, "items": [1, 2, "x"]}),),
    (("get_weather", {"text": "Oslo"}), ("search", {"note": "x", "count": 0})),
    (("now", {}), ("get_weather", {"count": 1}), ("now", {})),
    (("get_weather", {"text": "a"}), ("get_weather", {"text": "b"}), ("search", {"flag": False})),
)


@attrs.frozen
class History:
    """An answer with calls."""

    calls: tuple[Call, ...]
    content: str = ""
    reasoning: str = ""

    def message(self) -> dict[str, Any]:
        calls = [
            {
                "id": f"call{i:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(values, ensure_ascii=False)},
            }
            for i, (name, values) in enumerate(self.calls)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": calls} if calls else {})


HISTORIES = [
    History(calls, content, reasoning)
    for calls in _CALLS
    for content, reasoning in (("", ""), (SAID, ""), (SAID, THOUGHT))
]


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # which equals no arguments


def segments(text: str) -> list[str]:
    """Take a text apart into tags and single characters."""
    return re.findall(r"<[^<>]*>?|\[/?[A-Z_ ]+\]|.", text, flags=re.DOTALL)


def shared(one: str, other: str) -> str:
    """Give how two texts begin alike, without the beginning of a tag."""
    same = 0
    for a, b in zip(segments(one), segments(other), strict=False):
        if a != b:
            break
        same += len(a)
    return one[:same]


def shared_end(one: str, other: str) -> str:
    same = 0
    for a, b in zip(reversed(segments(one)), reversed(segments(other)), strict=False):
        if a != b:
            break
        same += len(a)
    return one[len(one) - same :]


class Shown:
    """What a template shows of answers."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._opened = [
            self._after(self._render([], kwargs={"enable_thinking": on})) for on in (True, False)
        ] + [self._after(self._render([]))]
        only_text = self._render([History((), SAID).message()], add_generation_prompt=False)
        self._end = only_text.rpartition(SAID)[2]

    def _render(self, answers: list[dict[str, Any]], **kwargs: Any) -> str:
        messages = [{"role": "user", "content": ASKED}, *answers]
        return self.template.render(messages, tools=TOOLS, **kwargs)

    def _after(self, prompt: str) -> str:
        return prompt.rpartition(ASKED)[2]

    def written(self, history: History) -> tuple[str, str]:
        """What stands for an answer: the end of the prompt, and what the model writes.

        Raises:
            TrioServeError: the template refuses it.
        """
        shown = self._after(self._render([history.message()], add_generation_prompt=False))
        prompt = max((shared(shown, opened) for opened in self._opened), key=len)
        text = shown[len(prompt) :]
        text = text.removesuffix(shared_end(text, self._end))
        for end in _ENDS:
            text = text.removesuffix(end)
        thinking = self.template.format.thinking
        if thinking is not None and thinking.end in text and thinking.start not in text:
            prompt = thinking.start  # a prompt for this answer would have begun the reasoning
        return prompt, text

    def problem(self, history: History, *, apart: bool) -> str | None:
        """Say how a history is not read back equal, if it isn't."""
        _, text = self.written(history)
        whole, pieces = self.read(history, apart=apart)
        if whole != pieces:
            return f"split: {text!r} {whole} {pieces}"
        found = tuple((call.name, read_json(call.arguments)) for call in whole.tool_calls)
        if found != history.calls:
            return f"calls: {text!r} {found}"
        for part, read in (
            (history.content, whole.content),
            (history.reasoning, whole.reasoning_content),
        ):
            if read.strip() != (part if part in text else ""):
                return f"text: {text!r} {read!r}"
        return None

    def read(self, history: History, *, apart: bool = False) -> tuple[Message, Message]:
        """Parse what is written, whole and character by character, or in every two pieces."""
        prompt, text = self.written(history)
        kwargs: dict[str, Any] = {"tools": TOOLS, "prompt_tail": prompt[-256:]}
        whole = parse([text], self.template.format, **kwargs)
        pieces: Iterator[Sequence[str]] = iter([list(text)])
        if apart:
            pieces = ((text[:i], text[i:]) for i in range(len(text) + 1))
        others = (parse(one, self.template.format, **kwargs) for one in pieces)
        return whole, next((other for other in others if other != whole), whole)


def differences(template: ChatTemplate) -> Iterator[tuple[History, str]]:
    """Find the histories that are not read back equal, each with how."""
    shown = Shown(template)
    can = template.capabilities
    histories = HISTORIES
    if not (can.supports_tools and can.supports_tool_calls):
        # The prompt has calls as JSON; a model that writes them so writes nothing else.
        histories = HISTORIES[::3] if template.recognized.name == "plain" else []
    if not can.supports_parallel_tool_calls:
        histories = [history for history in histories if len(history.calls) == 1]
    for i, history in enumerate(histories):
        try:
            if (problem := shown.problem(history, apart=i == 4)) is not None:
                yield history, problem
        except TrioServeError as error:
            yield history, f"refused: {error}"
