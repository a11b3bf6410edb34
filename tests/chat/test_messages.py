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


def said(content: Any = "Hi", role: Any = "user", **fields: Any) -> list[Any]:
    return [{"role": role, "content": content, **fields}]


def called(*calls: Any) -> list[Any]:
    return [{"role": "assistant", "tool_calls": list(calls)}]


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
        (said(role=1), "messages[0].role"),
        (said(role=""), "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0].content"),
        (said(5), "messages[0].content"),
        (said({}), "messages[0].content"),
        (said(["Hi"]), "messages[0].content[0]"),
        (said([{}]), "messages[0].content[0].type"),
        (said([{"type": "text"}]), "messages[0].content[0].text"),
        (said([{"type": "hologram"}]), "messages[0].content[0].type"),
        (said(name=1), "messages[0].name"),
        (said(role="tool", tool_call_id=1), "messages[0].tool_call_id"),
        (said(role="assistant", reasoning_content=1), "messages[0].reasoning_content"),
        (said(tool_calls=[CALL]), "messages[0].tool_calls"),
        (said(role="assistant", tool_calls={"a": 1}), "messages[0].tool_calls"),
        (called(1), "messages[0].tool_calls[0]"),
        (called({}), "messages[0].tool_calls[0].function"),
        (called({"type": "other"}), "messages[0].tool_calls[0].type"),
        (called({"function": {}}), "messages[0].tool_calls[0].function.name"),
        (
            called({"function": {"name": "f", "arguments": 1}}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (called({**CALL, "id": 1}), "messages[0].tool_calls[0].id"),
    ],
)
def test_a_fault_is_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message
    odd = "hologram" in str(messages) or "other" in str(messages)
    assert isinstance(caught.value, UnsupportedFieldError) is odd


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


def offered(**function: Any) -> list[Any]:
    return [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ("f", "tools"),
        ([1], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        (offered(), "tools[0].function.name"),
        (offered(name="f", description=1), "tools[0].function.description"),
        (offered(name="f", parameters="{}"), "tools[0].function.parameters"),
    ],
)
def test_a_fault_in_the_tools_is_named(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tools(tools)
    assert caught.value.param == param
