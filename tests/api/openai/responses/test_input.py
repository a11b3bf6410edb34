"""Requests of the Responses API: the chats they amount to, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.chat.template.builtin import CHATML
from trioserve.errors import InvalidRequestError
from trioserve.server import Server
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import MediaSource

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def messages_of(items: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(ResponsesRequest.parse({"input": items, **fields}).chat.messages)


def test_text_and_instructions() -> None:
    assert messages_of("Hi", instructions="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    assert messages_of([], instructions="Be kind.") == [{"role": "system", "content": "Be kind."}]


def parts(kind: str, *texts: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


def test_messages_in_all_their_forms() -> None:
    refusal = {"type": "refusal", "refusal": "I won't."}
    said = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": parts("input_text", "Hi")},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [said, refusal],
        },
        {"role": "user", "content": parts("input_text", "a", "b")},
    ]
    assert messages_of(items) == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": parts("text", "Hello", "I won't.")},
        {"role": "user", "content": parts("text", "a", "b")},
    ]


def test_items_of_the_assistant_are_one_message() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": parts("summary_text", "in short"),
            "content": parts("reasoning_text", "Hm."),
            "encrypted_content": "",
        },
        {"type": "message", "role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1'},
        {"type": "reasoning", "summary": parts("summary_text", "And again.")},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": parts("input_text", "rain")},
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
                {**call, "id": "c1", "function": {"name": "weather", "arguments": '{"a": 1'}},
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
        {
            "type": "reasoning",
            "summary": [],
            "content": parts("reasoning_text", "Two."),
            "trioserve_step": "a",
        },
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


def test_calls_of_one_step_are_one_message() -> None:
    own = {"type": "function_call", "call_id": "g", "name": "g", "arguments": ""}
    output = {"type": "function_call_output", "call_id": "g", "output": "2"}
    items = [made("f", output="1", trioserve_step="a"), {**own, "trioserve_step": "a"}, output]
    own_result = {"role": "tool", "content": "2", "tool_call_id": "g"}
    expected = [called("f", "g"), result("f", "1"), own_result]
    assert messages_of(items) == expected
    hi = {"role": "user", "content": "Hi"}
    assert messages_of([*items, hi, *items]) == [*expected, hi, *expected]


def test_without_names_of_steps_each_call_is_a_step() -> None:
    items = [made("f", output="1"), made("g", output="2")]
    assert messages_of(items) == [called("f"), result("f", "1"), called("g"), result("g", "2")]


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
    chat = ResponsesRequest.parse(body).chat
    assert chat.max_tokens == 7
    variables = {"enable_thinking": True, "reasoning_effort": "low", "verbosity": "low"}
    assert chat.template_kwargs == variables
    assert chat.grammar is not None and chat.grammar.param == "text.format"
    assert (chat.logprobs, chat.top_logprobs, chat.n_probs) == (True, 2, 2)
    assert chat.scalars == {"temperature": 0.5, "top_k": 3}
    function = {"name": "weather", "parameters": {"type": "object"}}
    assert chat.tools == ({"type": "function", "function": function},)


def test_files_among_the_parts() -> None:
    given = [
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
        {"role": "user", "content": given},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": given[1:2]},
    ]
    shown, _, result = messages_of(items)
    types = [part["type"] for part in shown["content"]]
    assert types == ["text", "media", "media", "media", "text", "media", "media"]
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


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [*tools]}}


def custom(kind: str, **format: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "f", "format": {"type": kind, **format}}


#: An item, where it is wrong, and what is said of that place; None: other tests know.
ITEMS: list[tuple[Any, str, str | None]] = [
    ("Hi", "", "must be an object."),
    (
        {"id": "msg_1"},
        "",
        "refers to an item that is not stored; send the item itself.",
    ),
    (
        {"type": "compression", "encrypted_content": "gAAA"},
        ".type",
        "is 'compression'; it must be one of message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, mcp_call, web_search_call, reasoning, "
        "additional_tools, agent_message, compaction, compaction_summary, "
        "context_compaction, compaction_trigger, "
        "local_shell_call, shell_call, apply_patch_call, computer_call, "
        "tool_search_call, local_shell_call_output, shell_call_output, apply_patch_call_output, "
        "computer_call_output, tool_search_output.",
    ),
    (made("f", output=1), ".output", "must be a string."),
    (made("f", error={"type": "x"}), ".error.message", "is required."),
    ({"type": "mcp_call", "output": "1"}, ".id", "is required."),
    (
        {"role": "tool", "content": ""},
        ".role",
        "must be one of user, system, developer, assistant.",
    ),
    ({"role": "user"}, ".content", "is required."),
    (
        {"role": "assistant", "content": [{"type": "input_image"}]},
        ".content[0].type",
        "is 'input_image'; it must be one of output_text, input_text, refusal.",
    ),
    ({"type": "function_call_output", "output": "x"}, ".call_id", "is required."),
    ({"type": "reasoning", "summary": "x"}, ".summary", "must be a list of parts."),
]
#: The same of a part of what the user says.
PARTS: list[tuple[Any, str, str | None]] = [
    (
        {"type": "computer_screenshot"},
        "type",
        "is 'computer_screenshot'; it must be one of input_text, input_image, input_audio, "
        "input_video, input_file.",
    ),
    ({"type": "input_text", "text": 1}, "text", "must be a string."),
    ({"type": "input_image", "detail": "auto"}, "image_url", None),
    (
        {"type": "input_image", "file_id": "file_1"},
        "file_id",
        "names no file that is stored here.",
    ),
    ({"type": "input_image", "image_url": "data:image/png,"}, "image_url", None),
    ({"type": "input_image", "image_url": "aGk=", "detail": "best"}, "detail", None),
    ({"type": "input_file", "file_id": "file_1"}, "file_id", None),
    ({"type": "input_file", "file_url": "a.pdf"}, "file_url", None),
    ({"type": "input_file", "filename": "a.txt"}, "file_data", None),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio", None),
]
#: The same of other fields.
FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": 5}, "input", "must be a string or a list of items."),
    ({"input": []}, "input", "must not be empty."),
    ({"instructions": []}, "instructions", "must be a string."),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is required."),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "is required."),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name",
        "is required.",
    ),
    ({"tools": [custom("grammar", syntax="gbnf")]}, "tools[0].format.syntax", None),
    ({"tools": [custom("grammar", syntax="lark")]}, "tools[0].format.definition", "is required."),
    ({"tools": [custom("json")]}, "tools[0].format.type", 'must be "text" or "grammar".'),
    (
        {"tool_choice": {"type": "file_search"}},
        "tool_choice.type",
        "is 'file_search', and 'tools' has none of this type.",
    ),
    (
        {"tools": [{"type": "file_search"}], "tool_choice": {"type": "file_search"}},
        "tool_choice",
        "is 'file_search', and this server has no such tool.",
    ),
    (
        {"tools": [{"type": "file_search"}], **allowed("auto", {"type": "file_search"})},
        "tool_choice.tools",
        "has none that is here: this server has no such tool.",
    ),
    ({"tool_choice": "any"}, "tool_choice", 'must be "auto", "none", "required" or an object.'),
    (allowed("none"), "tool_choice.mode", 'must be "auto" or "required".'),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function"}},
        "tool_choice.name",
        "is required.",
    ),
    (allowed("auto", {}), "tool_choice.tools[0].type", "is required."),
    ({"metadata": {"a": 1}}, "metadata", None),
    ({"reasoning": {"effort": 1}}, "reasoning.effort", None),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", None),
    ({"text": {"format": {"type": "json_object"}}, "json_schema": {}}, "text.format", None),
    (
        {"text": {"format": {}}, "response_format": {}},
        "text.format",
        "and 'response_format' exclude each other.",
    ),
    ({"text": {"verbosity": 1}}, "text.verbosity", None),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'message.output_text.logprobs' in 'include'."),
    ({"max_output_tokens": "7"}, "max_output_tokens", None),
    ({"temperature": "hot"}, "temperature", "must be a number."),
    (
        {"trioserve_run_tools": True, "context_management": [{"type": "compaction"}]},
        "context_management",
        "is not supported where the server runs tools.",
    ),
]
NO_EFFECT = {
    "prompt": {"id": "pmpt_1"},
    "n": 2,
}


def refused() -> Iterator[tuple[dict[str, Any], str, str | None]]:
    """Bodies, the field that is wrong, and what is said of it."""
    yield {}, "input", "is required."
    for item, place, problem in ITEMS:
        yield {"input": [item]}, f"input[0]{place}", problem
    for part, name, problem in PARTS:
        content = {"role": "user", "content": [part]}
        yield {"input": [content]}, f"input[0].content[0].{name}", problem
    for fields, param, problem in FIELDS:
        yield {"input": "Hi", **fields}, param, problem
    for name, value in NO_EFFECT.items():
        problem = "is not supported with this value; leave it out."
        yield {"input": "Hi", name: value}, name, problem


def test_messages_of_agents_and_files_of_codex() -> None:
    audio = {"type": "input_audio", "audio_url": "https://example.org/a.wav"}
    said = [
        {
            "type": "agent_message",
            "author": "/root",
            "recipient": "/root/a",
            "content": [
                {"type": "encrypted_content", "encrypted_content": "gAAA"},
                {"type": "input_text", "text": "Continue."},
            ],
        },
        {"type": "reasoning", "content": [{"type": "text", "text": "Hm."}]},
        {"role": "user", "content": [audio]},
        {"type": "configuration_update"},
    ]
    first, thought, heard = messages_of(said)
    assert first == {"role": "user", "content": "Continue."}
    assert thought["reasoning_content"] == "Hm."
    (part,) = heard["content"]
    assert (part["media"].kind, part["media"].url) == ("audio", "https://example.org/a.wav")


@pytest.mark.parametrize(("body", "param", "problem"), [*refused()])
def test_errors_name_the_field(body: dict[str, Any], param: str, problem: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ResponsesRequest.parse(body)
    assert caught.value.param == param
    assert caught.value.status == 400
    if problem is not None:
        assert caught.value.message == f"'{param}' {problem}"


def test_fields_without_effect_are_accepted() -> None:
    fields = {
        "store": True,
        "background": False,
        "truncation": "auto",
        "service_tier": "auto",
        "reasoning": {"summary": "detailed", "context": "all_turns"},
        "stream_options": {"include_obfuscation": True},
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "previous_response_id": None,
        "prompt": None,
        "conversation": None,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "prompt_cache_key": "k",
        "user": "u",
        "max_tool_calls": 3,
        "model": "gpt-4.1",
        "parallel_tool_calls": True,
    }
    assert messages_of("Hi", **fields) == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("'messages' must.", "messages", ("'input' must.", "input")),
        ("messages[1]: No.", "messages[1]", ("input[0]: No.", "input[0]")),
        ("'messages[1].a[0].id' is.", "messages[1].a[0].id", ("'input[0]' is.", "input[0]")),
        ("'top_k' is.", "top_k", ("'top_k' is.", "top_k")),
        ("'tools[1].function.a' is.", "tools[1].function.a", ("'tools[1].a' is.", "tools[1].a")),
        ("The prompt has 9 tokens.", "prompt", ("The prompt has 9 tokens.", "input")),
    ],
)
def test_errors_of_chats_name_items(message: str, param: str, expected: tuple[str, str]) -> None:
    request = ResponsesRequest.parse(
        {"instructions": "x", "input": [{"role": "user", "content": "y"}]}
    )
    with pytest.raises(InvalidRequestError) as caught, request.input.naming_items():
        raise InvalidRequestError(message, param=param)
    assert (caught.value.message, caught.value.param) == expected


async def test_a_call_without_a_result_cannot_be_continued() -> None:
    items = [{"role": "user", "content": "Hi"}, CALL]
    request = ResponsesRequest.parse({"input": items})
    backend = ScriptedBackend(chat_template=CHATML)
    async with Server(load=scripted(backend)) as server:
        with pytest.raises(InvalidRequestError) as caught, request.input.naming_items():
            await server.render(
                request.chat.messages,
                continue_final_message=request.chat.continuation.continue_final_message,
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
def test_any_body_is_a_chat_or_a_400(items: Any, body: dict[str, Any]) -> None:
    try:
        request = ResponsesRequest.parse({"input": items, **body})
    except InvalidRequestError:
        return
    assert len(request.input.places) == len(request.chat.messages)
