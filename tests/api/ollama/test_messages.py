"""Ollama's messages and tools in the normal form."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ollama_api import WEATHER
from tests.support.scripts import HI
from trioserve.api.base.fields import MismatchError
from trioserve.api.ollama.request import (
    continues_final_message,
    read_messages,
    read_tools,
    with_images,
)
from trioserve.chat.messages import parse_messages, parse_tools
from trioserve.errors import InvalidRequestError
from trioserve.types import MediaSource


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"city": "Rome"}}, **more}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def result(name: str | None = None, **more: Any) -> dict[str, Any]:
    named = {} if name is None else {"tool_name": name}
    return {"role": "tool", "content": "Rain", **named, **more}


def ids_in(messages: Any) -> list[str]:
    found = []
    for message in messages:
        found += [one["id"] for one in message.get("tool_calls", ())]
        found += [message["tool_call_id"]] if "tool_call_id" in message else []
    return found


def test_a_message_in_normal_form() -> None:
    said = {"role": "assistant", "content": "Hi", "thinking": "Hm", "images": [], "tool_name": None}
    assert read_messages([*HI, said]) == (
        *HI,
        {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"},
    )
    assert read_messages([{"role": "user"}]) == ({"role": "user", "content": ""},)
    assert read_messages([]) == ()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("What?", "01What?"),
        ("See [img] and [img]!", "See 0 and 1!"),
        ("[img]", "10"),
        ("Is [img] it?", "1Is 0 it?"),
        ("[img][img]: [img]", "01: [img]"),
        ("", "01"),
    ],
)
def test_images_stand_where_the_text_says(said: str, shown: str) -> None:
    content = with_images(said, ["MA==", "MQ=="], "images")  # 0 and 1
    assert not isinstance(content, str)
    parts = [
        part["text"] if part["type"] == "text" else part["media"].data.decode() for part in content
    ]
    assert "".join(parts) == shown and "" not in parts


def test_images_stand_before_the_text() -> None:
    shown = {"role": "user", "content": "What?", "images": ["aGk=", "data:image/png;base64,aG8="]}
    first, second = (
        {"type": "media", "media": MediaSource(kind="image", data=data, param=f"messages[0].{at}")}
        for data, at in ((b"hi", "images[0]"), (b"ho", "images[1]"))
    )
    assert read_messages([shown])[0]["content"] == [
        first,
        second,
        {"type": "text", "text": "What?"},
    ]
    shown["content"] = ""
    messages = read_messages([shown])
    assert messages[0] == {"role": "user", "content": [first, second]}
    assert parse_messages(messages) is messages


def test_calls_without_ids_get_some_and_so_do_their_results() -> None:
    messages = read_messages(
        [
            *HI,
            calling(call("a"), call("b"), call("b")),
            result("b"),
            result("a"),
            result("b"),
            calling(call("a")),
            result(),
        ]
    )
    assert ids_in(messages) == [f"call0000{n}" for n in (1, 2, 3, 2, 1, 3, 4, 4)]
    assert [one.get("name") for one in messages if one["role"] == "tool"] == ["b", "a", "b", "a"]
    arguments = messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"city": "Rome"}'
    assert parse_messages(messages) is messages


def test_ids_that_are_given_stay() -> None:
    messages = read_messages(
        [
            *HI,
            calling(call("a", id="x"), call("a", id="y")),
            result(tool_call_id="y"),
            result("a", tool_call_id="unknown"),
            result("a"),
            result("a"),
        ]
    )
    assert ids_in(messages) == ["x", "y", "y", "unknown", "x"]
    assert messages[2]["name"] == "a"
    assert "tool_call_id" not in messages[5]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "Hi", "images": "aGk="}, "messages[1].images"),
        ({"role": "user", "images": [{"data": "aGk="}]}, "messages[1].images"),
        ({"role": "user", "images": ["aGk=", "aG?="]}, "messages[1].images[1]"),
        ({"role": "user", "images": ["aGk="] * 1025}, "messages[1].images"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"content": "Hi"}, "messages[1].role"),
        ({"role": "assistant", "thinking": 5}, "messages[1].thinking"),
        ({"role": "tool", "content": "a", "tool_name": 5}, "messages[1].tool_name"),
        ({"role": "user", "content": "", "tool_calls": [call("a")]}, "messages[1].tool_calls"),
        (calling({"function": {}}), "messages[1].tool_calls[0].function.name"),
    ],
)
def test_a_refusal_names_the_parameter(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_messages([*HI, message])
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("value", ["Hi", [1], {}])
def test_messages_are_a_list_of_objects(value: Any) -> None:
    with pytest.raises(MismatchError):
        read_messages(value)


def test_the_last_message_may_be_continued() -> None:
    begun = {"role": "assistant", "content": "So"}
    assert continues_final_message({"messages": [*HI, begun]})
    assert not continues_final_message({"messages": HI})
    assert not continues_final_message({"messages": [*HI, begun], "continue_final_message": False})
    assert not continues_final_message({})
    with pytest.raises(InvalidRequestError, match="needs its result") as caught:
        continues_final_message({"messages": [*HI, calling(call("a"))]})
    assert caught.value.param == "messages[1]"


def test_the_type_of_a_tool_may_be_left_out() -> None:
    tools = read_tools([{"function": WEATHER["function"]}])
    assert tools == (WEATHER,)
    assert parse_tools(tools) is tools
    assert read_tools([{"type": "web_search"}]) == ()
    with pytest.raises(InvalidRequestError, match="function"):
        read_tools([{}])
    with pytest.raises(MismatchError):
        read_tools({})
