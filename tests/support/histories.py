"""Histories of tool calls, and what a chat template writes for them, as its model would."""

# ruff: noqa: RUF001 - one of these markers has wide bars on purpose

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.message_writers import Call
from tests.support.parsing import parse
from trioserve.chat.derive.probes import Answer
from trioserve.chat.template.render import ChatTemplate

SAID = "Said0, then."
THOUGHT = "Thought0; so."

#: Markers after calls that end a turn. A server does not see them as text.
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


HISTORIES = [
    Answer(calls=calls, content=content, reasoning=reasoning)
    for calls in _CALLS
    for content, reasoning in (("", ""), (SAID, ""), (SAID, THOUGHT))
]


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # which equals no arguments


def written(template: ChatTemplate, answer: Answer) -> tuple[str, str]:
    """A template's text for an answer: the end of the prompt, and the text of the model."""
    probes, thinking = template.probes, template.format.thinking
    prompt, text = probes.without_prompt(probes.written(answer))
    text = probes.without_end(text)
    for end in _ENDS:
        text = text.removesuffix(end)
    if thinking is not None and thinking.end in text and thinking.start not in text:
        prompt = thinking.start  # a prompt for this answer would have begun the reasoning
    return prompt, text


def problem_of(template: ChatTemplate, answer: Answer, *, apart: bool) -> str | None:
    """Say how an answer is not read back equal, if it isn't.

    It is read whole and in single characters, or in every two pieces.
    """
    prompt, text = written(template, answer)
    kwargs: dict[str, Any] = {"tools": TOOLS, "prompt_tail": prompt[-256:]}
    whole = parse([text], template.format, **kwargs)
    splits = [(text[:i], text[i:]) for i in range(len(text) + 1)] if apart else [list(text)]
    for pieces in splits:
        if (other := parse(pieces, template.format, **kwargs)) != whole:
            return f"{pieces} {other}"
    found = tuple((call.name, read_json(call.arguments)) for call in whole.tool_calls)
    if found != answer.calls:
        return f"{text!r} {found}"
    for part, read in (
        (answer.content, whole.content),
        (answer.reasoning, whole.reasoning_content),
    ):
        if read.strip() != (part if part in text else ""):
            return f"{text!r} {read!r}"
    return None


def differences(template: ChatTemplate) -> Iterator[tuple[Answer, str]]:
    """Find the histories that are not read back equal, each with how."""
    can = template.capabilities
    if not (can.supports_tools and can.supports_tool_calls):
        return  # its model writes calls as the prompt says, which no history shows
    for i, answer in enumerate(HISTORIES):
        if len(answer.calls) > 1 and not can.supports_parallel_tool_calls:
            continue
        if (problem := problem_of(template, answer, apart=i == 4)) is not None:
            yield answer, problem
