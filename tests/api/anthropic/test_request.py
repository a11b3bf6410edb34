"""What requests to Anthropic's routes may hold, and what is made of it."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from tests.support.anthropic_api import ASK, WEATHER
from tests.support.json_values import JSON, places
from tests.support.scripts import HI
from trioserve.api.anthropic.messages import read_messages, sign
from trioserve.api.anthropic.request import (
    BUDGET_TOKENS,
    MAX_TOKENS,
    CountTokensRequest,
    MessagesRequest,
)
from trioserve.chat.messages import parse_messages, parse_tools
from trioserve.errors import InvalidRequestError
from trioserve.types import DocumentSource, MediaSource

# -- messages


def read(*messages: Any, **fields: Any) -> tuple[dict[str, Any], ...]:
    return read_messages({"messages": list(messages), **fields})


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln", "n": [1]}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
FOUND = {
    "type": "search_result",
    "title": "Panda",
    "source": "https://example.org/panda",
    "content": [part("A bear."), part("It eats bamboo.")],
}


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert read(*HI, user(block("there")), assistant(block("A")), assistant(), *HI) == (
        {"role": "user", "content": [part("Hi\n\n"), part("there")]},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "Hi"},
    )


def test_results_of_tools_are_messages_in_their_order() -> None:
    failed = RESULT | {"tool_use_id": "t2", "is_error": True, "content": "No."}
    messages = read(*HI, assistant(USE), user(RESULT, failed, block("So?")))
    arguments = '{"city":"Köln","n":[1]}'
    called = {"name": "weather", "arguments": arguments}
    assert messages[1:] == (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "t1", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "", "name": "weather"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: No."},
        {"role": "user", "content": "So?"},
    )


def media(data: bytes | None, place: str, **more: Any) -> dict[str, Any]:
    param = f"messages[0].content[{place}"
    return {"type": "media", "media": MediaSource(kind="image", data=data, param=param, **more)}


def test_images() -> None:
    url = "https://example.org/cat.png"
    shown = user(
        block("Look:"),
        image(**PNG, data="aGk=") | {"cache_control": {"type": "ephemeral"}},
        image(type="url", url=url),
    )
    assert read(shown)[0]["content"] == [
        part("Look:"),
        media(b"hi", "1].source.data"),
        media(None, "2].source.url", url=url),
    ]
    assert read(user(image(**PNG, data="aGk=")))[0]["content"] == [media(b"hi", "0].source.data")]


def test_images_in_the_result_of_a_tool() -> None:
    shown = RESULT | {"content": [block("A"), image(**PNG, data="aGk=")]}
    failed = RESULT | {"is_error": True, "content": [image(**PNG, data="aGk=")]}
    first, second = read(user(shown, failed))
    assert first["content"] == [part("A"), media(b"hi", "0].content[1].source.data")]
    assert second["content"] == [part("Error: "), media(b"hi", "1].content[0].source.data")]


def test_what_a_search_has_found_is_given_as_text() -> None:
    head = "Search result: Panda\nSource: https://example.org/panda\n"
    expected = f"{head}```\nA bear.\n\nIt eats bamboo.\n```"
    quiet = FOUND | {"citations": {"enabled": False}}
    assert read(user(quiet))[0]["content"] == expected
    assert read(user(RESULT | {"content": [FOUND]}))[0]["content"] == [part(expected)]


def test_documents_are_given_as_text() -> None:
    about = {"title": "a.txt", "context": "A list.", "citations": {"enabled": False}}
    written = "File: a.txt\nA list.\n```\nx\n```"
    for source in (
        {"type": "text", "media_type": "text/plain", "data": "x\n"},
        {"type": "content", "content": "x"},
        {"type": "base64", "media_type": "text/plain", "data": "eA=="},
    ):
        assert read(user(document(**source) | about))[0]["content"] == written
    content = [block("x"), image(**PNG, data="aGk=")]
    assert read(user(document(**CONTENT, content=content) | about))[0]["content"] == [
        part("File: a.txt\nA list."),
        part("x"),
        media(b"hi", "0].source.content[1].source.data"),
    ]
    assert read(user(document(type="text", data="x")))[0]["content"] == "```\nx\n```"


def test_a_pdf_is_read_later() -> None:
    given = document(**PDF, data="JVBERi0xLjcK") | {"title": "a.pdf", "context": "A list."}
    source = DocumentSource(
        data=b"%PDF-1.7\n",
        name="a.pdf",
        about="A list.",
        param="messages[0].content[0].source.data",
    )
    assert read(user(given))[0]["content"] == [{"type": "document", "document": source}]
    given["source"] = {"type": "url", "url": "https://example.org/a.pdf"}
    path = "messages[0].content[0].source.url"
    source = attrs.evolve(source, data=None, url="https://example.org/a.pdf", param=path)
    assert read(user(given))[0]["content"] == [{"type": "document", "document": source}]


def test_a_system_message_may_stand_between_others() -> None:
    assert read(*HI, {"role": "system", "content": [block("Now in French.")]})[-1] == {
        "role": "system",
        "content": "Now in French.",
    }


@given(st.text())
def test_thinking_that_was_not_shown_comes_back_in_its_signature(text: str) -> None:
    for hidden in (
        {"type": "thinking", "thinking": "", "signature": sign(text, shown=False)},
        {"type": "redacted_thinking", "data": sign(text, shown=False)},
    ):
        message = read(*HI, assistant(hidden, block("A")))[1]
        assert message.get("reasoning_content", "") == text


def test_thinking_that_another_has_sealed_is_left_out() -> None:
    sealed = [
        {"type": "redacted_thinking", "data": "EqQBCgIYAhIM1gbcDa9GJwZA2b"},
        {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b"},
    ]
    assert read(*HI, assistant(*sealed, block("A")))[1] == {"role": "assistant", "content": "A"}


def test_a_number_that_changes_each_time_does_not_change_the_prefix() -> None:
    head = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};You are."
    first, second = (read(*HI, system=head.format(number)) for number in ("a5145", "0b7e9"))
    assert first == second
    assert read(*HI, system="cch=a5145;")[0]["content"] == "cch=a5145;"


# -- what may be asked


def test_the_least_request() -> None:
    request = MessagesRequest.parse({"messages": HI})
    assert request.given_params() == {"max_tokens": MAX_TOKENS}
    assert request.thinking.enabled is None


def test_fields_that_all_routes_share() -> None:
    request = MessagesRequest.parse(
        ASK | {"seed": 3, "top_k": 5, "top_p": 0.5, "temperature": 0.1, "timeout": 5}
    )
    params = {"max_tokens": 200, "seed": 3, "top_k": 5, "top_p": 0.5, "temperature": 0.1}
    assert request.given_params() == params
    assert request.timeout == 5


def test_thinking_without_a_number_has_llama_servers() -> None:
    request = CountTokensRequest.parse({"messages": HI, "thinking": {"type": "enabled"}})
    assert request.thinking.budget == BUDGET_TOKENS


def test_fields_that_nobody_knows_are_ignored() -> None:
    MessagesRequest.parse(
        ASK | {"context_management": {}, "service_tier": "auto", "cache_control": {}}
    )


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


PNG = {"type": "base64", "media_type": "image/png"}
PDF = {"type": "base64", "media_type": "application/pdf"}
CONTENT = {"type": "content"}
WRONG_FILES: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "image"}, "source", "is required."),
    (image(), "source.type", "is required."),
    (
        image(type="file", file_id="f"),
        "source.type",
        "is 'file', and no files are kept here; send the file itself.",
    ),
    (image(type="text", data="x"), "source.type", "is 'text'; it must be one of base64, url."),
    (image(type="base64", media_type="image/png"), "source.data", "is required."),
    (
        image(type="base64", media_type="text/plain", data="aGk="),
        "source.media_type",
        "must be the type of an image, such as image/png.",
    ),
    (
        image(**PNG, data="aG?="),
        "source.data",
        "is not valid base64.",
    ),
    (
        image(**PNG, data="aGk=") | {"transformations": {"oversized_image": "error"}},
        "transformations",
        "is not supported; leave it out.",
    ),
    (
        document(type="url", url="YS5wZGY="),
        "source.url",
        "must be a URL of http, https or file.",
    ),
    (
        document(type="pdf"),
        "source.type",
        "is 'pdf'; it must be one of base64, text, content, url.",
    ),
    (document(**PDF, data="/w=="), "source.data", "is neither a PDF nor a text."),
    (
        document(type="text", data="x") | {"citations": {"enabled": True}},
        "citations",
        "is not supported; leave it out.",
    ),
    (document(type="text", data="x") | {"title": 5}, "title", "must be a string."),
    (
        document(**CONTENT, content=[document(**CONTENT, content=[])]),
        "source.content[0].type",
        "is 'document', which is not supported in a document.",
    ),
]


M = "messages[0]"
C = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": None}, "messages", "'messages' is required."),
        ({"messages": "Hi"}, "messages", "'messages' must be a list of objects."),
        ({"messages": []}, "messages", "'messages' must not be empty."),
        ({"messages": [{}]}, f"{M}.role", f"'{M}.role' is required."),
        (
            {"messages": [{"role": "tool", "content": ""}]},
            f"{M}.role",
            f'\'{M}.role\' must be "user", "assistant" or "system".',
        ),
        ({"messages": [{"role": "user"}]}, f"{M}.content", f"'{M}.content' is required."),
        (
            {"messages": [{"role": "user", "content": 5}]},
            f"{M}.content",
            f"'{M}.content' must be a string or a list of blocks.",
        ),
        ({"messages": [user({})]}, f"{C}.type", f"'{C}.type' is required."),
        ({"messages": [user({"type": "text"})]}, f"{C}.text", f"'{C}.text' is required."),
        (
            {"messages": [user(part("Hi") | {"citations": [{}]})]},
            f"{C}.citations",
            f"'{C}.citations' is not supported; leave it out.",
        ),
        *(
            (
                {"messages": [user({"type": kind})]},
                f"{C}.type",
                f"'{C}.type' is '{kind}', which is not supported in a message of the user.",
            )
            for kind in ("mid_conversation", "container_upload", "tool_use")
        ),
        (
            {"messages": [assistant({"type": "server_tool_use"})]},
            f"{C}.type",
            f"'{C}.type' is 'server_tool_use', "
            "which is not supported in a message of the assistant.",
        ),
        (
            {"messages": [user(RESULT | {"content": [{"type": "tool_reference"}]})]},
            f"{C}.content[0].type",
            f"'{C}.content[0].type' is 'tool_reference', which is not supported in the result of a "
            "tool.",
        ),
        (
            {"messages": [user(FOUND | {"source": None})]},
            f"{C}.source",
            f"'{C}.source' is required.",
        ),
        (
            {"messages": [user(FOUND | {"content": [{"type": "image"}]})]},
            f"{C}.content[0].type",
            f"'{C}.content[0].type' is 'image', which is not supported in the result of a search.",
        ),
        (
            {"messages": [user(FOUND | {"citations": {"enabled": True}})]},
            f"{C}.citations",
            f"'{C}.citations' is not supported; leave it out.",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "image"}]}]},
            f"{C}.type",
            f"'{C}.type' is 'image', which is not supported in a message of the system.",
        ),
        *(
            ({"messages": [user(block)]}, f"{C}.{param}", f"'{C}.{param}' {problem}")
            for block, param, problem in WRONG_FILES
        ),
        (
            {"messages": [user(RESULT | {"content": [image(type="base64", data="?")]})]},
            f"{C}.content[0].source.media_type",
            f"'{C}.content[0].source.media_type' is required.",
        ),
        (
            {"messages": [user({"type": "tool_result"})]},
            f"{C}.tool_use_id",
            f"'{C}.tool_use_id' is required.",
        ),
        (
            {"messages": [user(RESULT | {"is_error": 1})]},
            f"{C}.is_error",
            f"'{C}.is_error' must be true or false.",
        ),
        (
            {"messages": [assistant(USE | {"input": "{}"}), *HI]},
            f"{C}.input",
            f"'{C}.input' must be an object.",
        ),
        (
            {"messages": [*HI, assistant(USE)]},
            "messages[1].content[0]",
            "'messages[1].content[0]' needs a 'tool_result' after it.",
        ),
        (
            {"messages": [assistant({"type": "redacted_thinking", "data": "trioserve.%"})]},
            f"{C}.data",
            f"'{C}.data' must be as it was received.",
        ),
        ({"system": 5}, "system", "'system' must be a string or a list of blocks."),
        (
            {"system": [{"type": "image"}]},
            "system[0].type",
            "'system[0].type' is 'image', which is not supported in a system prompt.",
        ),
        ({"max_tokens": -2}, "max_tokens", "'max_tokens' must be between -1 and 2147483647."),
        ({"stop_sequences": "x"}, "stop_sequences", "'stop_sequences' must be a list of strings."),
        ({"temperature": "hot"}, "temperature", "'temperature' must be a number."),
        ({"tools": [{}]}, "tools[0].name", "'tools[0].name' is required."),
        (
            {"tools": [{"name": "", "input_schema": {}}]},
            "tools[0].name",
            "'tools[0].name' must be a string, and not empty.",
        ),
        (
            {"tools": [{"name": "f"}]},
            "tools[0].input_schema",
            "'tools[0].input_schema' is required.",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type",
            "'tools[0].type' is 'web_search_20250305': this server has no tools of its own.",
        ),
        (
            {"tools": [WEATHER | {"defer_loading": True}]},
            "tools[0].defer_loading",
            "'tools[0].defer_loading' is not supported with this value; leave it out.",
        ),
        (
            {"tool_choice": "any"},
            "tool_choice",
            "'tool_choice' must be an object.",
        ),
        (
            {"tool_choice": {"type": "required"}},
            "tool_choice.type",
            '\'tool_choice.type\' must be "auto", "any", "tool" or "none".',
        ),
        (
            {"tool_choice": {"type": "tool"}},
            "tool_choice.name",
            "'tool_choice.name' is required.",
        ),
        (
            {"thinking": {"type": "between_tools"}},
            "thinking.type",
            '\'thinking.type\' must be "enabled", "disabled" or "adaptive".',
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": -1}},
            "thinking.budget_tokens",
            "'thinking.budget_tokens' must be between 0 and 2147483647.",
        ),
        (
            {"thinking": {"type": "adaptive", "display": "secret"}},
            "thinking.display",
            '\'thinking.display\' must be "summarized" or "omitted".',
        ),
        (
            {"output_config": {"format": {"type": "text"}}},
            "output_config.format.type",
            "'output_config.format.type' must be \"json_schema\".",
        ),
        (
            {"output_format": {"type": "json_schema"}},
            "output_format.schema",
            "'output_format.schema' is required.",
        ),
        *(
            (
                {name: value},
                name,
                f"'{name}' is not supported with this value; leave it out.",
            )
            for name, value in {
                "container": "c1",
                "diagnostics": {"previous_message_id": "msg_1"},
                "inference_geo": "us",
                "mcp_servers": [{}],
                "n": 2,
                "speed": "fast",
                "timings_per_token": True,
                "user_profile_id": "u1",
            }.items()
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MessagesRequest.parse(ASK | fields)
    assert (caught.value.message, caught.value.param) == (message, param)


FILES = [
    image(**PNG, data="aGk="),
    image(type="url", url="https://example.org/cat.png"),
    document(**CONTENT, content=[block("x")]) | {"title": "a.txt"},
]
VALID = ASK | {
    "system": [block("Be brief.")],
    "messages": [*HI, assistant(USE, block("A")), user(RESULT | {"content": [block("B")]}, *FILES)],
    "tools": [WEATHER],
    "tool_choice": {"type": "tool", "name": "weather"},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "metadata": {"user_id": "me"},
    "stop_sequences": ["x"],
}


@given(st.data())
def test_whatever_is_wrong_is_told(data: st.DataObject) -> None:
    body = json.loads(json.dumps(VALID))
    MessagesRequest.parse(body)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(body)))
        container[key] = data.draw(JSON)
    request, problem = None, None
    try:
        request = MessagesRequest.parse(body)
    except InvalidRequestError as error:
        problem = error
    if request is not None:  # then `Server` finds nothing wrong with its form
        parse_messages(request.messages)
        parse_tools(request.tools)
    else:
        assert problem is not None
        assert problem.param is not None and problem.param in problem.message
