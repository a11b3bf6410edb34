"""The fields of requests to Anthropic's routes, and the prompts and settings they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import attrs
import pytest
from hypothesis import given, strategies as st

from tests.support.anthropic_api import ASK, WEATHER
from tests.support.scripts import HI
from trioserve.api.anthropic.messages import read_messages, sign
from trioserve.api.anthropic.request import (
    MAX_TOKENS,
    MessagesRequest,
)
from trioserve.errors import InvalidRequestError
from trioserve.types import DocumentSource, MediaSource

#: The fields left out since the last call, by the log, each with the reason.
LeftOut: TypeAlias = Callable[[], list[tuple[str, str]]]

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


def test_search_results_become_text() -> None:
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


@given(st.text(max_size=100))
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
    unknown = {"context_management": {}, "service_tier": "auto", "cache_control": {}}
    request = MessagesRequest.parse({"messages": HI, **unknown})
    assert request.given_params() == {"max_tokens": MAX_TOKENS}
    assert request.thinking is None


def test_fields_that_all_routes_share() -> None:
    request = MessagesRequest.parse(
        ASK | {"seed": 3, "top_k": 5, "top_p": 0.5, "temperature": 0.1, "timeout": 5}
    )
    params = {"max_tokens": 200, "seed": 3, "top_k": 5, "top_p": 0.5, "temperature": 0.1}
    assert request.given_params() == params
    assert request.timeout == 5


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


PNG = {"type": "base64", "media_type": "image/png"}
PDF = {"type": "base64", "media_type": "application/pdf"}
CONTENT = {"type": "content"}
#: Fields of requests, and what the error says of them.
Wrong: TypeAlias = list[tuple[dict[str, Any], str, str]]

LEAVE_OUT = "is not supported; leave it out."
UNSUPPORTED = "is not supported with this value; leave it out."
NO_IMAGE = "must be the type of an image, such as image/png."


def misplaced(kind: str, where: str) -> str:
    return f"is '{kind}', which is not supported in {where}."


#: Blocks that the user says.
BLOCKS: Wrong = [
    ({}, "type", "is required."),
    ({"type": "text"}, "text", "is required."),
    ({"type": "tool_use"}, "type", misplaced("tool_use", "a message of the user")),
    ({"type": "image"}, "source", "is required."),
    (image(), "source.type", "is required."),
    (
        image(type="file", file_id="f"),
        "source.file_id",
        "names no file that is stored here.",
    ),
    (
        image(type="text", data="x"),
        "source.type",
        "is 'text'; it must be one of base64, url, file.",
    ),
    (image(**PNG), "source.data", "is required."),
    (image(type="base64", data="aGk="), "source.media_type", "is required."),
    (image(type="base64", media_type="text/plain", data="aGk="), "source.media_type", NO_IMAGE),
    (image(**PNG, data="aG?="), "source.data", "is not valid base64."),
    (
        image(**PNG, data="aGk=") | {"transformations": {"oversized_image": "error"}},
        "transformations",
        LEAVE_OUT,
    ),
    (document(type="url", url="YS5wZGY="), "source.url", "must be a URL of http, https or file."),
    (
        document(type="pdf"),
        "source.type",
        "is 'pdf'; it must be one of base64, text, content, url, file.",
    ),
    (document(**PDF, data="/w=="), "source.data", "is neither a PDF nor a text."),
    (document(type="text", data="x") | {"title": 5}, "title", "must be a string."),
    (
        document(**CONTENT, content=[document(**CONTENT, content=[])]),
        "source.content[0].type",
        misplaced("document", "a document"),
    ),
    (
        RESULT | {"content": [{"type": "tool_reference"}]},
        "content[0].tool_name",
        "is required.",
    ),
    ({"type": "tool_result"}, "tool_use_id", "is required."),
    (RESULT | {"is_error": 1}, "is_error", "must be true or false."),
    (FOUND | {"source": None}, "source", "is required."),
    (
        FOUND | {"content": [{"type": "image"}]},
        "content[0].type",
        misplaced("image", "the result of a search"),
    ),
]
#: Blocks of the assistant.
SAID: Wrong = [
    ({"type": "tool_result"}, "type", misplaced("tool_result", "a message of the assistant")),
    (USE | {"input": "{}"}, "input", "must be an object."),
    ({"type": "redacted_thinking", "data": "trioserve.%"}, "data", "must be as it was received."),
]
M = "messages[0]"
FIELDS: Wrong = [
    ({"messages": None}, "messages", "is required."),
    ({"messages": []}, "messages", "must not be empty."),
    ({"messages": [{}]}, f"{M}.role", "is required."),
    (turn("tool", ""), f"{M}.role", 'must be "user", "assistant" or "system".'),
    ({"messages": [{"role": "user"}]}, f"{M}.content", "is required."),
    (turn("user", 5), f"{M}.content", "must be a string or a list of blocks."),
    (
        turn("system", [{"type": "image"}]),
        f"{M}.content[0].type",
        misplaced("image", "a message of the system"),
    ),
    (
        {"messages": [*HI, assistant(USE)]},
        "messages[1].content[0]",
        "needs a 'tool_result' after it.",
    ),
    ({"system": 5}, "system", "must be a string or a list of blocks."),
    ({"system": [{"type": "image"}]}, "system[0].type", misplaced("image", "a system prompt")),
    ({"tools": [{}]}, "tools[0].name", "is required."),
    (
        {"tools": [{"name": "", "input_schema": {}}]},
        "tools[0].name",
        "must be a string, and not empty.",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required."),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is required."),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema", "is required."),
]
HARMLESS: dict[str, Any] = {
    "container": "c1",
    "diagnostics": {"previous_message_id": "msg_1"},
    "inference_geo": "us",
    "mcp_servers": [{}],
    "return_progress": True,
    "speed": "fast",
    "timings_per_token": True,
    "user_profile_id": "u1",
}


def wrong() -> Iterator[tuple[dict[str, Any], str, str]]:
    for role, blocks in ((user, BLOCKS), (assistant, SAID)):
        for block, name, problem in blocks:
            yield {"messages": [role(block), *HI]}, f"{M}.content[0].{name}", problem
    yield from FIELDS
    for name in ("n", "n_cmpl"):
        yield {name: 2}, name, UNSUPPORTED


@pytest.mark.parametrize(("fields", "param", "problem"), [*wrong()])
def test_a_refusal_names_the_parameter(fields: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MessagesRequest.parse(ASK | fields)
    assert (caught.value.message, caught.value.param) == (f"'{param}' {problem}", param)


def test_fields_that_change_no_answer_are_left_out(left_out: LeftOut) -> None:
    MessagesRequest.parse(ASK | HARMLESS)
    assert {what for what, _ in left_out()} == HARMLESS.keys()
    cited = [part("Hi") | {"citations": [{}]}, FOUND | {"citations": {"enabled": True}}]
    MessagesRequest.parse(ASK | {"messages": [user(*cited)]})
    assert left_out() == [("citations", "answers have none")]


def test_blocks_of_tools_that_are_not_here_are_left_out(left_out: LeftOut) -> None:
    hosted = [
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": []},
    ]
    upload = {"type": "container_upload", "file_id": "f"}
    request = MessagesRequest.parse(
        ASK | {"messages": [*HI, assistant(*hosted, part("X.")), user(upload, part("Why?"))]}
    )
    assert [message["content"] for message in request.messages[1:]] == [
        "X.",
        "Why?",
    ]
    kinds = ("server_tool_use", "web_search_tool_result", "container_upload")
    assert [what for what, _ in left_out()] == [f"blocks of type {kind}" for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "commands"),
    [
        ("text_editor_20241022", ["view", "create", "str_replace", "insert", "undo_edit"]),
        ("text_editor_20250728", ["view", "create", "str_replace", "insert"]),
        ("memory_20250818", ["view", "create", "str_replace", "insert", "delete", "rename"]),
    ],
)
def test_tools_that_the_client_runs_have_known_schemas(kind: str, commands: list[str]) -> None:
    given = [{"type": kind, "name": "edit"}, {"type": "bash_20250124", "name": "bash"}]
    request = MessagesRequest.parse(ASK | {"tools": given})
    edit, bash = (tool["function"] for tool in request.tools)
    assert (edit["name"], bash["name"]) == ("edit", "bash")
    assert edit["parameters"]["properties"]["command"]["enum"] == commands
    assert bash["parameters"]["properties"].keys() == {"command", "restart"}


def test_tools_of_the_api_are_left_out(left_out: LeftOut) -> None:
    given = [
        {"type": "code_execution_20250825", "name": "code_execution"},
        WEATHER | {"defer_loading": True, "input_examples": [{"city": "Paris"}]},
        WEATHER | {"name": "f", "allowed_callers": ["code_execution_20250825"]},
    ]
    request = MessagesRequest.parse(ASK | {"tools": given})
    weather, _ = (tool["function"] for tool in request.tools)
    assert weather["description"].endswith('Example of input: {"city": "Paris"}')
    assert [what for what, _ in left_out()] == [
        "tools of type code_execution_20250825",
        "tools[].defer_loading",
        "tools[].allowed_callers",
    ]
