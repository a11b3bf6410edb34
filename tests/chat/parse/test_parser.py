"""The parser of generated text: streamed equals whole, and nothing is lost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import attrs
import pytest

from tests.support import families, parsing
from tests.support.parsing import make_parser
from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.parse.message import REASONING_FORMATS, new_call_id
from trioserve.errors import InvalidRequestError

HERMES_THINK = families.HERMES_THINK


def deltas_of(
    pieces: Iterable[str], format: ChatFormat = HERMES_THINK, **kwargs: Any
) -> list[Delta]:
    return parsing.deltas_of(pieces, format, **kwargs)


def parse(pieces: list[str] | str, **kwargs: Any) -> Message:
    return parsing.built(deltas_of([pieces] if isinstance(pieces, str) else pieces, **kwargs))


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = ToolCall("call_0", "get_weather", '{"city": "Oslo"}')


BEGUN = {"prompt_tail": "<|im_start|>assistant\n<think>\n"}
ENDED = {"prompt_tail": "<think>\n\n</think>"}
LATE = "Write <think>this</think>."


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ("Hello", {}, Message("Hello")),
        (" \n Hello", {}, Message(" \n Hello")),
        # Reasoning loses the newlines around it, and the whitespace before it goes with it.
        ("<think>\nHm.\n\nSo.\n</think>\n\nHello\n", {}, Message("Hello\n", "Hm.\n\nSo.")),
        ("\n <think>Hm</think>Hello", {}, Message("Hello", "Hm")),
        ("\nHm.\n</think>\n\nHello", BEGUN, Message("Hello", "Hm.")),
        ("\n\nHello", ENDED, Message("Hello")),
        (LATE, {}, Message(LATE)),
        ("<think>\nHm.\n</thin", {}, Message("", "Hm.\n</thin")),
        ("<think>Hm</think>Hi", {"format": families.HERMES}, Message("<think>Hm</think>Hi")),
    ],
)
def test_reasoning_and_content(text: str, kwargs: dict[str, Any], message: Message) -> None:
    assert parse(text, **kwargs) == message


def test_empty_reasoning_makes_no_delta() -> None:
    assert deltas_of(["<think>\n\n</think>\n\nHi"]) == [ContentDelta("Hi")]


@pytest.mark.parametrize(
    ("reasoning_format", "expected"),
    [
        ("auto", Message("Hi", "Hm")),
        ("deepseek", Message("Hi", "Hm")),
        ("none", Message("<think>\nHm\n</think>\n\nHi")),
        ("deepseek-legacy", Message("<think>\nHm\n</think>\n\nHi", "Hm")),
    ],
)
def test_reasoning_formats(reasoning_format: str, expected: Message) -> None:
    text = "<think>\nHm\n</think>\n\nHi"
    assert parse(text, reasoning_format=reasoning_format) == expected


def test_only_legacy_reasoning_gets_the_marker_that_is_in_the_prompt() -> None:
    text, tail = "Hm</think>Hi", "<think>\n"
    legacy = parse(text, reasoning_format="deepseek-legacy", prompt_tail=tail)
    assert legacy == Message("<think>Hm</think>Hi", "Hm")
    assert parse(text, reasoning_format="none", prompt_tail=tail) == Message("Hm</think>Hi")


def test_a_call_in_reasoning_is_a_call() -> None:
    for name, (to_reasoning, shown) in REASONING_FORMATS.items():
        for end in ("", "</think>"):
            message = parse(f"<think>Hm\n{CALL}\nSo{end}", reasoning_format=name)
            assert message.tool_calls == (WEATHER,)
            assert message.reasoning_content == ("HmSo" if to_reasoning else "")
            assert message.content == (f"<think>Hm\nSo{end}" if shown else "")


OFFERED = {"tools": [{"type": "function", "function": {"name": "get_weather"}}]}


@pytest.mark.parametrize(
    ("text", "kwargs"),
    [
        (CALL.replace("get_weather", "other"), OFFERED),
        ("a <tool_call> of", {}),
        ("<tool_call>", {}),
        (CALL, {"parse_tools": False}),
    ],
)
def test_what_is_no_call_in_reasoning_is_reasoning(text: str, kwargs: dict[str, Any]) -> None:
    for pieces in ([f"<think>{text}</think>Hi"], f"<think>{text}</think>Hi"):
        assert parsing.parse(pieces, HERMES_THINK, **kwargs) == Message("Hi", text)
    assert parse(f"<think>{text}", **kwargs) == Message("", text)
    if kwargs is OFFERED:
        assert parse(f"{text}<think>{CALL}", **kwargs).tool_calls[1:] == (
            attrs.evolve(WEATHER, id="call_1"),
        )


THOUGHT = "<think>Hm</think>"


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (f"{THOUGHT}\n\n<think>So</think>\nHi", "Hi", "HmSo"),
        (f"{THOUGHT}Hi\n<think>\nSo\n</think>\nyou", "Hi\nyou", "HmSo"),
        (f"{THOUGHT}Hi<think>So</think>you", "Hiyou", "HmSo"),
        (f"{THOUGHT}Hi<think>\nSo", "Hi", "HmSo"),
        ("Hi\n <think>So</think>you", "Hi\n you", "So"),
        (f"{CALL}\n<think>So</think>you", "you", "So"),
        # An answer may mention the marker.
        (f"{THOUGHT}Between <think> and", "Between <think> and", "Hm"),
        (f"{THOUGHT}Use `<think>so`", "Use `<think>so`", "Hm"),
        (f"{THOUGHT}Hi<think>", "Hi<think>", "Hm"),
        (f"{THOUGHT}See:\n```\n<think>x\n```\n<think>So", "See:\n```\n<think>x\n```\n", "HmSo"),
    ],
)
def test_more_reasoning(text: str, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        message = parse(pieces)
        assert (message.content, message.reasoning_content) == (content, reasoning)
    shown = parse(text, reasoning_format="none").content
    assert shown.replace("\n", "") == text.replace(CALL, "").replace("\n", "")


def test_a_marker_that_nobody_writes_always_begins_reasoning() -> None:
    text = "So [THINK]Hm[/THINK]Hi"
    message = parse(text, format=families.MISTRAL_THINK)
    assert message == Message("So Hi", "Hm")


def test_an_answer_in_a_format_has_no_markers() -> None:
    text = '<think>Hm</think>{"a": "\n<think>"}'
    assert parse(text, is_formatted=True) == Message('{"a": "\n<think>"}', "Hm")
    said = '<response>{"a": 1}'
    assert parse(said, format=families.GRANITE_3, is_formatted=True) == Message(said)


def test_an_unknown_reasoning_format_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_parser(HERMES_THINK, reasoning_format="deep")
    assert caught.value.param == "reasoning_format"


def test_reasoning_content_and_two_calls() -> None:
    message = parse(f"<think>\nHm\n</think>\n\nLook:\n\n{CALL}\n{CALL}\nDone.")
    second = ToolCall("call_1", WEATHER.name, WEATHER.arguments)
    assert message == Message("Look:Done.", "Hm", (WEATHER, second))


def test_a_call_without_its_end_marker() -> None:
    assert parse(CALL.removesuffix("</tool_call>")) == Message(tool_calls=(WEATHER,))
    assert parse(CALL.removesuffix("all>")) == Message(tool_calls=(WEATHER,))


def test_calls_are_content_unless_asked_for() -> None:
    assert parse(f"Look:\n{CALL}", parse_tools=False) == Message(f"Look:\n{CALL}")


def test_arguments_before_the_name() -> None:
    text = '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>'
    assert parse(text) == Message(tool_calls=(WEATHER,))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", "{}"),
        ("null", "{}"),
        (' { "a" : [1, -2.5e3, true, null] } ', '{ "a" : [1, -2.5e3, true, null] }'),
        (json.dumps('{"a": "b"}'), '{"a": "b"}'),
        ('"just text"', '"just text"'),
        ("[1]", "[1]"),
        ("12", "12"),
        ('{"a": "one\ntwo"}', '{"a": "one\\u000atwo"}'),
        (r'{"a": "\u00e9\"}"}', r'{"a": "\u00e9\"}"}'),
    ],
)
def test_arguments(arguments: str, expected: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(pieces) == Message(tool_calls=(ToolCall("call_0", "f", expected),))
    json.loads(expected)


def test_missing_arguments_are_an_empty_object() -> None:
    text = '<tool_call>{"type": "function", "name": "f"}</tool_call>'
    assert parse(text) == Message(tool_calls=(ToolCall("call_0", "f", "{}"),))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> no JSON </tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"city": "Oslo"}</tool_call>',
        "<tool_call>{}</tool_call>",
        "<tool_call>[]</tool_call>",
        "\n\n<tool_call>\nfoo(1)\n</tool_call>\n\n",
        '<tool_call>{"name": "get',
        '<tool_call>{"arguments": {"a": 1}, "na',
        "a < b <tool_cal and <tool",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(text) == Message(text)
    assert parse(list(text)) == Message(text)


def test_a_call_after_what_is_no_call() -> None:
    assert parse(f"<tool_call>{CALL}") == Message("<tool_call>", "", (WEATHER,))


def test_a_call_that_goes_wrong_after_its_name() -> None:
    message = parse('<tool_call>{"name": "f", "arguments": {"a": oh no}}</tool_call>')
    assert message == Message("oh no}}</tool_call>", "", (ToolCall("call_0", "f", '{"a": '),))


def test_an_unknown_member_after_the_arguments_is_content() -> None:
    message = parse('<tool_call>{"name": "f", "arguments": {}, "why": "x"}</tool_call>')
    call = ToolCall("call_0", "f", "{}")
    assert message == Message(', "why": "x"}</tool_call>', "", (call,))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f"', ""),
        ('<tool_call>{"name": "f", "argu', ""),
        ('<tool_call>{"name": "f", "type": "func', ""),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        (r'<tool_call>{"name": "f", "arguments": {"a": "\u00', r'{"a": "\u00'),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\"', r'"{\"a\"'),
        ('<tool_call>{"name": "f", "arguments": {}', "{}"),
    ],
)
def test_a_call_that_is_cut_off_keeps_what_has_come(text: str, arguments: str) -> None:
    assert parse(text) == Message(tool_calls=(ToolCall("call_0", "f", arguments),))


def test_a_call_streams() -> None:
    parser = make_parser(HERMES_THINK)
    assert parser.feed('\n<tool_call>\n{"name": "f') == []
    assert parser.feed('", ') == [ToolCallStart(0, "call_0", "f")]
    assert parser.feed('"arguments": {"ci') == [ToolCallArguments(0, '{"ci')]
    assert parser.feed('ty": "Os') == [ToolCallArguments(0, 'ty": "Os')]
    assert parser.feed('lo"}}') == [ToolCallArguments(0, 'lo"}')]
    assert parser.feed("\n</tool_call>") == []
    assert parser.finish() == []
    assert parser.finish() == []


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    parser = make_parser(HERMES_THINK)
    assert parser.feed("Hello") == [ContentDelta("Hello")]
    assert parser.feed(" <tool") == [ContentDelta(" ")]
    assert parser.feed("_x") == [ContentDelta("<tool_x")]
    assert parser.feed("\n<") == []
    assert parser.feed("b") == [ContentDelta("\n<b")]
    parser = make_parser(HERMES_THINK)
    assert parser.feed("<th") == []
    assert parser.feed("ink>\n") == []
    assert parser.feed("Hm\n") == [ReasoningDelta("Hm")]
    assert parser.feed("so</") == [ReasoningDelta("\nso")]
    assert parser.feed("think>") == []


def test_ids_cannot_be_guessed() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", id_) for id_ in ids)


# -- properties


@pytest.mark.parametrize("reasoning_format", ["none", "deepseek-legacy"])
def test_every_split_in_two_and_three(reasoning_format: str) -> None:
    call = '{"name": "f", "arguments": {"a": 1}}'
    text = f"<think>\nHm\n</think>\n\nHi\n<tool_call>\n{call}\n</tool_call>\n"
    whole = parse(text, reasoning_format=reasoning_format)
    assert whole.tool_calls == (ToolCall("call_0", "f", '{"a": 1}'),)
    for a, b in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        pieces = [text[:a], text[a:b], text[b:]]
        assert parse(pieces, reasoning_format=reasoning_format) == whole
