"""Requests of the Responses API: the chats they amount to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.chat.template.render import CHATML
from trioserve.errors import InvalidRequestError
from trioserve.server import Server
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import MediaSource

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def messages_of(items: Any, **fields: Any) -> list[dict[str, Any]]:
    _, chat = ResponsesRequest.parse({"input": items, **fields})
    return list(chat.messages)


def test_text_and_instructions() -> None:
    assert messages_of("Hi", instructions="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    assert messages_of([], instructions="Be kind.") == [{"role": "system", "content": "Be kind."}]


def test_messages_in_all_their_forms() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "I won't."},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    assert messages_of(items) == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "I won't."}],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]


def test_what_the_assistant_did_is_one_message() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "in short"}],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "",
        },
        {"type": "message", "role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1}'},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "And again."}]},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {"type": "reasoning", "summary": []},
    ]
    call = {"type": "function", "function": {"name": "weather"}}
    assert messages_of(items) == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.\nAnd again.",
            "tool_calls": [
                {**call, "id": "c1", "function": {"name": "weather", "arguments": '{"a": 1}'}},
                {**call, "id": "c2", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "tool_call_id": "c2"},
    ]


def made(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "mcp_call",
        "id": f"mcp_{name}",
        "server_label": "trioserve",
        "name": name,
        "arguments": "{}",
        **fields,
    }


def called(*names: str) -> dict[str, Any]:
    function = {"arguments": "{}"}
    calls = [
        {"id": name, "type": "function", "function": {"name": name, **function}} for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": name, "name": name}


def test_calls_that_the_server_has_made() -> None:
    hi = {"role": "user", "content": "Hi"}
    failed = {"type": "mcp_tool_execution_error", "content": "gone"}
    items = [
        hi,
        {"type": "reasoning", "summary": [], "content": [thought("Two.")], "trioserve_step": "a"},
        made("f", output="1", trioserve_step="a"),
        made("g", error=failed, trioserve_step="a"),
        made("h", output="3", trioserve_step="b"),
        made("cut", status="incomplete", trioserve_step="c"),
    ]
    assert messages_of(items) == [
        hi,
        {**called("f", "g"), "reasoning_content": "Two."},
        result("f", "1"),
        result("g", "gone"),
        called("h"),
        result("h", "3"),
    ]


def test_calls_of_which_the_client_makes_one_are_one_message() -> None:
    own = {"type": "function_call", "call_id": "g", "name": "g", "arguments": ""}
    output = {"type": "function_call_output", "call_id": "g", "output": "2"}
    items = [made("f", output="1", trioserve_step="a"), {**own, "trioserve_step": "a"}, output]
    own_result = {"role": "tool", "content": "2", "tool_call_id": "g"}
    expected = [called("f", "g"), result("f", "1"), own_result]
    assert messages_of(items) == expected
    hi = {"role": "user", "content": "Hi"}
    assert messages_of([*items, hi, *items]) == [*expected, hi, *expected]


def test_without_the_names_of_steps_each_call_is_a_step() -> None:
    items = [made("f", output="1"), made("g", output="2")]
    assert messages_of(items) == [called("f"), result("f", "1"), called("g"), result("g", "2")]


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def test_the_fields_that_a_chat_has_under_other_names() -> None:
    body = {
        "input": "Hi",
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 7,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "temperature": 0.5,
        "top_k": 3,
        "stream_options": {"include_obfuscation": False},
    }
    _, chat = ResponsesRequest.parse(body)
    assert chat.max_tokens == 7
    assert chat.template_kwargs == {"reasoning_effort": "low", "verbosity": "low"}
    assert chat.grammar is not None and chat.grammar.param == "text.format"
    assert (chat.logprobs, chat.top_logprobs, chat.n_probs) == (True, 2, 2)
    assert chat.scalars == {"temperature": 0.5, "top_k": 3}
    function = {"name": "weather", "parameters": {"type": "object"}}
    assert chat.tools == ({"type": "function", "function": function},)


def test_files_among_the_parts() -> None:
    parts = [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"},
        {"type": "input_image", "image_url": "https://example.org/a.png", "file_id": None},
        {"type": "input_audio", "input_audio": {"data": "aG8=", "format": "wav"}},
        {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGE="},
        {"type": "input_file", "filename": "a.mp3", "file_data": "data:audio/mpeg;base64,/w=="},
        {"type": "input_file", "filename": "b", "file_data": "/w=="},
    ]
    path = "input[0].{}[{}].{}"
    items = [
        {"role": "user", "content": parts},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": parts[1:2]},
    ]
    shown, _, result = messages_of(items)
    assert [part["type"] for part in shown["content"]] == [
        "text",
        "media",
        "media",
        "media",
        "text",
        "media",
        "media",
    ]
    assert shown["content"][4]["text"] == "File: a.txt\n```\nha\n```"
    assert [part["media"] for part in shown["content"] if "media" in part] == [
        MediaSource(kind="image", data=b"hi", param=path.format("content", 1, "image_url")),
        MediaSource(
            kind="image",
            url="https://example.org/a.png",
            param=path.format("content", 2, "image_url"),
        ),
        MediaSource(kind="audio", data=b"ho", param=path.format("content", 3, "input_audio")),
        MediaSource(kind="audio", data=b"\xff", param=path.format("content", 5, "file_data")),
        MediaSource(kind=None, data=b"\xff", param=path.format("content", 6, "file_data")),
    ]
    source = MediaSource(kind="image", data=b"hi", param="input[2].output[0].image_url")
    assert result["content"] == [{"type": "media", "media": source}]


ITEM = "input[0]"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "'input' is required."),
    ({"input": 5}, "input", "'input' must be a string or a list of items."),
    ({"input": []}, "input", "'input' must not be empty."),
    ({"input": ["Hi"]}, ITEM, "'input[0]' must be an object."),
    (
        {"input": [{"id": "msg_1"}]},
        ITEM,
        "'input[0]' refers to a stored item, and nothing is stored here; send the item itself.",
    ),
    (
        {"input": [{"type": "web_search_call"}]},
        f"{ITEM}.type",
        "'input[0].type' is 'web_search_call'; it must be one of message, function_call, "
        "function_call_output, mcp_call, reasoning.",
    ),
    (
        {"input": [{"type": "mcp_call", "id": "1", "name": "f", "output": 1}]},
        f"{ITEM}.output",
        "'input[0].output' must be a string.",
    ),
    (
        {"input": [{"type": "mcp_call", "id": "1", "name": "f", "error": {"type": "x"}}]},
        f"{ITEM}.error.message",
        "'input[0].error.message' is required.",
    ),
    (
        {"input": [{"type": "mcp_call", "output": "1"}]},
        f"{ITEM}.id",
        "'input[0].id' is required.",
    ),
    (
        {"input": [{"role": "tool", "content": ""}]},
        f"{ITEM}.role",
        "'input[0].role' must be one of user, system, developer, assistant.",
    ),
    ({"input": [{"role": "user"}]}, f"{ITEM}.content", "'input[0].content' is required."),
    (
        {"input": [{"role": "user", "content": [{"type": "computer_screenshot"}]}]},
        f"{ITEM}.content[0].type",
        "'input[0].content[0].type' is 'computer_screenshot'; it must be one of input_text, "
        "input_image, input_audio, input_video, input_file.",
    ),
    (
        {"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]},
        f"{ITEM}.content[0].type",
        "'input[0].content[0].type' is 'input_image'; it must be one of output_text, input_text, "
        "refusal.",
    ),
    *[
        ({"input": [{"role": "user", "content": [part]}]}, f"{ITEM}.content[0].{param}", message)
        for part, param, message in [
            ({"type": "input_image", "detail": "auto"}, "image_url", None),
            (
                {"type": "input_image", "file_id": "file_1"},
                "file_id",
                "'input[0].content[0].file_id' is not supported: no files are kept here. Send "
                "'image_url'.",
            ),
            ({"type": "input_image", "image_url": "data:image/png,hi"}, "image_url", None),
            ({"type": "input_image", "image_url": "aG?="}, "image_url", None),
            ({"type": "input_image", "image_url": "aGk=", "detail": "best"}, "detail", None),
            ({"type": "input_file", "file_id": "file_1"}, "file_id", None),
            ({"type": "input_file", "file_url": "a.pdf"}, "file_url", None),
            ({"type": "input_file", "filename": "a.txt"}, "file_data", None),
            ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio", None),
        ]
    ],
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
        f"{ITEM}.content[0].text",
        "'input[0].content[0].text' must be a string.",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1"}]},
        f"{ITEM}.arguments",
        "'input[0].arguments' must be the text of a JSON object.",
    ),
    (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        f"{ITEM}.call_id",
        "'input[0].call_id' is required.",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
        f"{ITEM}.encrypted_content",
        "'input[0].encrypted_content' cannot be read here; send 'content'.",
    ),
    (
        {"input": [{"type": "reasoning", "summary": "x"}]},
        f"{ITEM}.summary",
        "'input[0].summary' must be a list of parts.",
    ),
    ({"input": "Hi", "instructions": []}, "instructions", "'instructions' must be a string."),
    (
        {"input": "Hi", "tools": [{"type": "web_search"}]},
        "tools[0].type",
        "'tools[0].type' is 'web_search'; this server has no tools of its own, and takes those of "
        'type "function".',
    ),
    ({"input": "Hi", "tools": [{"type": "function"}]}, "tools[0].name", None),
    (
        {"input": "Hi", "tool_choice": {"type": "file_search"}},
        "tool_choice.type",
        "'tool_choice.type' is 'file_search'; it must be \"function\" or \"allowed_tools\".",
    ),
    (
        {"input": "Hi", "tool_choice": "any"},
        "tool_choice",
        '\'tool_choice\' must be "auto", "none", "required" or an object.',
    ),
    (
        {"input": "Hi", "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
        "tool_choice.mode",
        '\'tool_choice.mode\' must be "auto" or "required".',
    ),
    (
        {"input": "Hi", "tools": [WEATHER], "tool_choice": {"type": "function"}},
        "tool_choice.name",
        "'tool_choice.name' must be the name of a function.",
    ),
    (
        {"input": "Hi", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}},
        "tool_choice.tools[0].name",
        "'tool_choice.tools[0].name' must be the name of a function.",
    ),
    ({"input": "Hi", "metadata": {"a": 1}}, "metadata", None),
    ({"input": "Hi", "reasoning": {"effort": 1}}, "reasoning.effort", None),
    ({"input": "Hi", "reasoning": {"summary": "detailed"}}, "reasoning.summary", None),
    ({"input": "Hi", "text": {"format": {"type": "yaml"}}}, "text.format", None),
    (
        {"input": "Hi", "text": {"format": {"type": "json_object"}}, "json_schema": {}},
        "text.format",
        None,
    ),
    (
        {"input": "Hi", "text": {"format": {}}, "response_format": {}},
        "text.format",
        "'text.format' and 'response_format' exclude each other.",
    ),
    ({"input": "Hi", "text": {"verbosity": 1}}, "text.verbosity", None),
    ({"input": "Hi", "include": ["file_search_call.results"]}, "include[0]", None),
    (
        {"input": "Hi", "top_logprobs": 2},
        "top_logprobs",
        "'top_logprobs' needs 'message.output_text.logprobs' in 'include'.",
    ),
    ({"input": "Hi", "max_output_tokens": "7"}, "max_output_tokens", None),
    ({"input": "Hi", "temperature": "hot"}, "temperature", "'temperature' must be a number."),
    (
        {"input": "Hi", "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        None,
    ),
    *[
        (
            {"input": "Hi", name: value},
            name,
            f"'{name}' is not supported with this value; leave it out.",
        )
        for name, value in {
            "background": True,
            "conversation": "conv_1",
            "previous_response_id": "resp_1",
            "prompt": {"id": "pmpt_1"},
            "truncation": "auto",
            "n": 2,
        }.items()
    ],
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, message: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ResponsesRequest.parse(body)
    assert caught.value.param == param
    assert caught.value.status == 400
    if message is not None:
        assert caught.value.message == message


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "background": False, "truncation": "disabled", "service_tier": "auto"},
        {"previous_response_id": None, "prompt": None, "conversation": None},
        {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "user": "u"},
        {"max_tool_calls": 3, "model": "gpt-4.1", "parallel_tool_calls": True},
    ],
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert messages_of("Hi", **fields) == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("'messages' must not end.", "messages", ("'input' must not end.", "input")),
        (
            "messages[1]: The messages end.",
            "messages[1]",
            ("input[0]: The messages end.", "input[0]"),
        ),
        (
            "'messages[1].tool_calls[0].id' is missing.",
            "messages[1].tool_calls[0].id",
            ("'input[0]' is missing.", "input[0]"),
        ),
        (
            "'reasoning_effort' is.",
            "reasoning_effort",
            ("'reasoning.effort' is.", "reasoning.effort"),
        ),
        ("'top_k' is.", "top_k", ("'top_k' is.", "top_k")),
        (
            "'tools[1].function.description' is.",
            "tools[1].function.description",
            ("'tools[1].description' is.", "tools[1].description"),
        ),
        ("The prompt has 9 tokens.", "prompt", ("The prompt has 9 tokens.", "input")),
    ],
)
def test_errors_of_chats_name_items(message: str, param: str, expected: tuple[str, str]) -> None:
    request, _ = ResponsesRequest.parse(
        {"instructions": "x", "input": [{"role": "user", "content": "y"}]}
    )
    with pytest.raises(InvalidRequestError) as caught, request.input.naming_items():
        raise InvalidRequestError(message, param=param)
    assert (caught.value.message, caught.value.param) == expected


async def test_a_call_that_nobody_answered_cannot_go_on() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    request, chat = ResponsesRequest.parse({"input": items})
    backend = ScriptedBackend(chat_template=CHATML)
    async with Server(load=scripted(backend)) as server:
        with pytest.raises(InvalidRequestError) as caught, request.input.naming_items():
            await server.render(
                chat.messages, continue_final_message=chat.continuation.continue_final_message
            )
    assert caught.value.message == "'input[1]' has tool calls, so it cannot be continued."
    assert caught.value.param == "input[1]"


# -- anything

WORDS = """type role content text input_text output_text refusal summary reasoning message
input_image image_url input_file file_data input_audio
function_call function_call_output call_id name arguments output id format effort verbosity mode
tools function allowed_tools auto required user assistant json_schema schema"""
FIELDS = """instructions tools tool_choice reasoning text include metadata top_logprobs
max_output_tokens stream_options parallel_tool_calls user"""
names = st.sampled_from(WORDS.split())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)
fields = st.sampled_from(FIELDS.split())


@given(json_values | st.just("Hi"), st.dictionaries(fields, json_values, max_size=2))
def test_whatever_comes_is_a_chat_or_a_400(items: Any, body: dict[str, Any]) -> None:
    try:
        request, chat = ResponsesRequest.parse({"input": items, **body})
    except InvalidRequestError:
        return
    assert len(request.input.places) == len(chat.messages)
