"""The check of OpenAI's messages and tools."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.chat.messages import as_text, join_text, parse_messages, parse_tools
from trioserve.errors import InvalidRequestError, UnsupportedFieldError

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_text_stays() -> None:
    assert parse_messages([USER]) == (USER,)
    assert parse_messages(({"role": "user", "content": ""},)) == ({"role": "user", "content": ""},)


def test_what_was_parsed_is_not_parsed_again() -> None:
    messages, tools = parse_messages([USER]), parse_tools([TOOL])
    assert parse_messages(messages) is messages
    assert parse_tools(tools) is tools


def test_parts_stay_parts() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {}},
        {"type": "refusal", "refusal": "b"},
    ]
    parsed = parse_messages([{"role": "assistant", "content": parts}])
    assert parsed[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert join_text(parsed[0]["content"]) == "a\nb"


def test_what_the_sdk_sends_back_is_taken() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "reasoning_content": "",
        "tool_calls": [CALL],
    }
    assert parse_messages([message]) == (
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    )
    assert parse_messages([{"role": "assistant", "content": None, "tool_calls": []}]) == (
        {"role": "assistant", "content": ""},
    )


def test_what_came_before_tools_is_taken() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    (called,) = parse_messages([{"role": "assistant", "function_call": function}])
    assert called == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def test_a_refusal_is_what_the_assistant_said() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert parse_messages([refused]) == ({"role": "assistant", "content": "No."},)


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": "so"},
        {"content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Hi"}]},
        {"content": [{"type": "reasoning", "text": "so"}, {"type": "text", "text": "Hi"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]},
                {"type": "text", "text": "Hi"},
            ]
        },
    ],
)
def test_reasoning_of_any_form(message: dict[str, Any]) -> None:
    (parsed,) = parse_messages([{"role": "assistant", "content": "Hi", **message}])
    assert parsed["reasoning_content"] == "so"
    assert "reasoning" not in parsed
    assert as_text(parsed["content"]) == "Hi"


def test_fields_of_a_models_own_are_kept() -> None:
    message = {**USER, "name": "Ann", "citations": [1]}
    assert parse_messages([message]) == (message,)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({"a": "é"}, '{"a": "é"}'), (None, "{}"), ("", "{}"), ('{"a": 1', '{"a": 1')],
)
def test_arguments_become_text(arguments: object, expected: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    parsed = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert parsed[0]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": expected}}
    ]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_null_is_no_text(role: str) -> None:
    assert parse_messages([{"role": role, "content": None}]) == ({"role": role, "content": ""},)


def test_tools_that_a_provider_runs_are_left_out() -> None:
    function = {"type": "function", "function": {"name": "f"}}
    parsed = parse_tools([{"type": "web_search"}, function, {"type": "mcp", "server_label": "a"}])
    assert [tool["function"]["name"] for tool in parsed] == ["f"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("Hi", "messages"),
        ({}, "messages"),
        ([], "messages"),
        ([1], "messages[0]"),
        ([USER, None], "messages[1]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role"),
        ([{"role": "", "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{**USER, "name": 1}], "messages[0].name"),
        ([{"role": "tool", "content": "", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "reasoning_content": 1}], "messages[0].reasoning_content"),
        ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}],
            "messages[0].tool_calls[0].id",
        ),
    ],
)
def test_a_fault_is_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages[0].content[0].type"),
        (
            {"role": "assistant", "tool_calls": [{"type": "other"}]},
            "messages[0].tool_calls[0].type",
        ),
    ],
)
def test_what_is_not_supported_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        parse_messages([message])
    assert caught.value.param == param


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": None, "strict": True}}
    assert parse_tools([tool]) == (
        {
            "type": "function",
            "function": {
                "name": "f",
                "strict": True,
                "parameters": {"type": "object", "properties": {}},
            },
        },
    )
    assert parse_tools(None) == parse_tools([]) == ()


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ("f", "tools"),
        ([1], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "description": 1}}],
            "tools[0].function.description",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_fault_in_the_tools_is_named(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tools(tools)
    assert caught.value.param == param
