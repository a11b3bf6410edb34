"""The format of a model: its family's, one derived from its template, or plain."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trioserve.chat.deltas import Message, MessageBuilder
from trioserve.chat.derive.compare import (
    content_wrapped,
    find_calls,
    reasoning_mentioned,
    reasoning_switched,
    reasoning_written,
    short_ids,
)
from trioserve.chat.derive.probes import NAMES, SAID, THOUGHT, TOOLS, Answer, Probes
from trioserve.chat.formats.families import ASKED_FOR, PLAIN, SPECIAL, WITHOUT_TOOLS
from trioserve.chat.formats.syntax import ChatFormat, Reasoning, described
from trioserve.chat.parse.parser import message_parser
from trioserve.log import get_logger

_log = get_logger(__name__)


@attrs.frozen
class Recognized:
    """The format of a model, its name, and what each comparison found."""

    name: str
    format: ChatFormat
    findings: tuple[tuple[str, str], ...] = ()


def recognize(source: str, probes: Probes, *, shows_tools: bool, shows_calls: bool) -> Recognized:
    """Find the format of a template.

    Args:
        source: the template.
        probes: render it.
        shows_tools: it tells the model of tools. Otherwise the prompt does so as text, and asks for
            calls as JSON.
        shows_calls: it writes the calls of earlier answers.
    """
    name, format = _named(SPECIAL, source)
    findings: list[tuple[str, str]] = []
    if format.thinking is None:
        comparison, reasoning = _find_reasoning(source, probes)
        if reasoning is not None:
            findings.append((comparison, described(reasoning)))
        if name == "plain" and shows_tools and shows_calls:
            derived = _derive(probes, reasoning, findings)
            if derived is not None:
                return Recognized("derived", derived, tuple(findings))
        if name == "plain" and shows_tools:
            name, format = _named(ASKED_FOR, source)
        format = attrs.evolve(format, reasoning=reasoning)
    if not shows_tools:  # the prompt asks for calls
        name, asked = _named(WITHOUT_TOOLS, source) if name == "plain" else (name, PLAIN)
        format = attrs.evolve(format, tool_calls=asked.tool_calls)
    return Recognized(name, format, tuple(findings))


def _named(formats: Mapping[str, ChatFormat], source: str) -> tuple[str, ChatFormat]:
    fitting = (one for one in formats.items() if one[1].fits(source))
    return next(fitting, ("plain", PLAIN))


def _find_reasoning(source: str, probes: Probes) -> tuple[str, Reasoning | None]:
    answer = Answer(content=SAID, reasoning=THOUGHT)
    for compare in (reasoning_written, reasoning_switched):
        if (found := compare(probes)) is None:
            continue
        format = ChatFormat(reasoning=found, dropped=content_wrapped(probes, found))
        if _problem_of(format, probes, answer) is None:
            return compare.__name__, found
    return reasoning_mentioned.__name__, reasoning_mentioned(source)


def _derive(
    probes: Probes, reasoning: Reasoning | None, findings: list[tuple[str, str]]
) -> ChatFormat | None:
    """Derive a format; None if none is found, or if it does not read the template's own answers."""
    found = find_calls(probes, reasoning)
    if found is None:
        return None
    calls = attrs.evolve(found[1], short_ids=short_ids(probes))
    dropped = content_wrapped(probes, reasoning)
    findings += [(found[0], described(calls))]
    if dropped:
        findings += [(content_wrapped.__name__, described(dropped))]
    format = ChatFormat(reasoning=reasoning, tool_calls=calls, dropped=dropped)
    for answer in _ANSWERS:
        if calls.bare:  # it can only come first
            answer = attrs.evolve(answer, content="")
        if (problem := _problem_of(format, probes, answer)) is not None:
            _log.warning("derived format is discarded", problem=problem, calls=described(calls))
            findings.append(("discarded", problem))
            return None
    return format


# -- reading back

_QUOTED = {"a": 'She said "quit",\nand {this} [is] it.', "b": 7, "c": ""}
_ANSWERS = (
    Answer(calls=((NAMES[0], _QUOTED),)),
    Answer(calls=((NAMES[0], {}),)),
    Answer(content=SAID, calls=((NAMES[0], {"a": "x"}), (NAMES[1], {}), (NAMES[2], {"b": 7}))),
    Answer(content=SAID, reasoning=THOUGHT, calls=((NAMES[1], {"b": 7}),)),
)


def _problem_of(format: ChatFormat, probes: Probes, answer: Answer) -> str | None:
    """Say how an answer is not read back as it is, whole and in single characters, if it isn't."""
    shown = probes.written(answer)
    if any(name not in shown for name, _ in answer.calls):
        return None  # the template refuses it, or has a place for one call
    prompt, text = probes.without_prompt(shown)
    text = probes.without_end(text)
    thinking = format.reasoning
    if thinking is not None and thinking.end in text and thinking.start not in text:
        prompt = thinking.start  # which a prompt for this answer would end with
    message = _read([text], format, prompt)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    if list(map(_parsed, calls)) != [(name, dict(given)) for name, given in answer.calls]:
        return f"The calls of {text!r:.500} are read as {calls}."
    for part, read in ((SAID, message.content), (THOUGHT, message.reasoning_content)):
        if read.strip() != (part if part in text else ""):
            return f"A text of {text!r:.500} is read as {read!r:.200}."
    if _read(text, format, prompt) != message:
        return f"Read character by character, {text!r:.500} is another message."
    return None


def _parsed(call: tuple[str, str]) -> tuple[str, Any]:
    try:
        return call[0], json.loads(call[1])
    except ValueError:
        return call


def _read(pieces: Iterable[str], format: ChatFormat, prompt: str) -> Message:
    parser = message_parser(format, parse_tools=True, prompt_tail=prompt, new_id=str, tools=TOOLS)
    builder = MessageBuilder()
    for piece in pieces:
        for delta in parser.feed(piece):
            builder.add(delta)
    for delta in parser.finish():
        builder.add(delta)
    return builder.build()
