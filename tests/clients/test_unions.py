"""Every value of ``type`` that the SDKs' requests may have is read, or refused for a reason.

The types of the SDKs are walked through: of each union whose members have a ``type``, each member
is read once at each place, with the fields that it must have. So a test names what is new.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any

import anthropic.types.beta.message_create_params as beta_messages
import anthropic.types.message_create_params as messages
import openai.types.chat.completion_create_params as chats
import openai.types.responses.response_create_params as responses
import pytest
import typing_extensions as typed

from trioserve.api.anthropic.request import MessagesRequest
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.errors import InvalidRequestError, UnknownFileError

_ADDED = (typing.Required, typing.NotRequired, typing.Annotated, typed.Required, typed.NotRequired)

_REQUIRED = (typing.Required, typed.Required)

#: Values of fields that do not accept any text, number or object.
VALUES: Mapping[str, Any] = {
    "data": "eA==",
    "file_data": "eA==",
    "image_url": "https://example.org/a.png",
    "input_schema": {"type": "object"},
    "url": "https://example.org/a.png",
}


def bare(kind: Any) -> Any:
    """A type without what says how often a field of it occurs."""
    while typing.get_origin(kind) in _ADDED:
        kind = typing.get_args(kind)[0]
    return kind


def members(kind: Any) -> list[Any]:
    """The members of a union, without None; of another type, that alone."""
    kind = bare(kind)
    if typing.get_origin(kind) not in (typing.Union, UnionType):
        return [kind] * (kind is not type(None))
    return [one for each in typing.get_args(kind) for one in members(each)]


def literals(kind: Any) -> list[Any]:
    """The values of a type that has a few."""
    some = [each for each in members(kind) if typing.get_origin(each) is typing.Literal]
    return [value for each in some for value in typing.get_args(each)]


def fields_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def tags(kind: Any) -> list[str]:
    """The values of ``type`` that an object may have."""
    return literals(fields_of(kind).get("type")) if typed.is_typeddict(kind) else []


def inner(kind: Any) -> Any:
    """The type of the items of a list type; None for other types."""
    origin = typing.get_origin(kind)
    if not isinstance(origin, type) or origin is dict or not hasattr(origin, "__iter__"):
        return None
    return typing.get_args(kind)[0]


def least(kind: Any, name: str = "", tag: str = "") -> Any:
    """The shortest value of a type; of an object, that with a tag."""
    if name in VALUES and not literals(kind):
        return VALUES[name]
    kind = members(kind)[0]
    if values := literals(kind):
        return values[0]
    if typed.is_typeddict(kind):
        fields = fields_of(kind).items()
        made = {n: least(one, n) for n, one in fields if typing.get_origin(one) in _REQUIRED}
        if not (tag := tag or next(iter(tags(kind)), "")):
            return made
        return made | {"type": tag} | MORE.get(tag, {})
    if (of_list := inner(kind)) is not None:
        return [least(of_list)]
    simple = {int: 1, float: 1, bool: True, str: "x"}
    return simple.get(kind, {})


def variants(kind: Any, path: str, seen: set[Any], tag: str = "") -> Iterator[tuple[str, str, Any]]:
    """The values of a type for each member of the unions in it: where that is, its tag, and it."""
    kind, several = bare(kind), members(kind)
    if len(several) > 1:
        for one in several:
            for each in tags(one) or [""]:
                if each:
                    yield path, each, least(one, tag=each)
                yield from variants(one, path, seen, each)
    elif several and (of_list := inner(several[0])) is not None:
        for place, found, value in variants(of_list, f"{path}[]", seen):
            yield place, found, [value]
    elif several and typed.is_typeddict(several[0]) and (several[0], tag) not in seen:
        seen.add((several[0], tag))
        whole = least(several[0], tag=tag)
        for name, of_field in fields_of(several[0]).items():
            at = f"{path}({tag}).{name}" if tag else f"{path}.{name}"
            for place, found, value in variants(of_field, at, seen):
                yield place, found, whole | {name: value}


#: Further fields of values with a tag, which need one of several.
MORE: Mapping[str, Mapping[str, Any]] = {
    "allowed_tools": {
        "tools": [{"type": "function", "name": "x"}],
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "x"}}],
        },
    },
    "compaction": {"content": "x"},
    "computer_call": {"action": {"type": "wait"}},
    "computer_screenshot": {"image_url": VALUES["image_url"]},
    "file": {"file": {"file_data": VALUES["file_data"]}},
    "function_call_output": {"call_id": "x"},
    "input_file": {"file_data": VALUES["file_data"]},
    "input_image": {"image_url": VALUES["image_url"]},
    "json_schema": {"json_schema": {"name": "x", "schema": {"type": "object"}}},
    "tool_search_call": {"call_id": "x"},
    "tool_search_output": {"call_id": "x"},
}
FUNCTION: dict[str, Any] = {"type": "function", "name": "x", "parameters": {}}

_ABSENT = "what the choice names is not here"


def _sources(path: str) -> dict[tuple[str, str], str]:
    """The limits on the sources of URLs to fetch, for a tool whose entry is at `path`."""
    results = ("all", "none", "only", "except")
    bounds = {"client_tool_results": results, "server_tool_results": results}
    return {
        (f"{path}(web_fetch_20250910).url_sources.{name}", tag): "it cannot be kept"
        for name, tags in (*bounds.items(), ("user_input", ("all", "none")))
        for tag in tags
    }


#: Refused values, with the reason. All others are read, or ignored because they change no answer.
REFUSED: Mapping[str, Mapping[tuple[str, str], str]] = {
    "responses": {
        (".input[]", "compaction"): "only its server can read it",
        (".input[]", "compaction_trigger"): "it must be the last item",
        (".input[]", "item_reference"): "the store has put items in its place, or it has none",
        **{
            (".tool_choice", tag): _ABSENT
            for tag in (
                *("file_search", "image_generation", "code_interpreter", "mcp"),
                "programmatic_tool_calling",
            )
        },
    },
    "chat": {},
    "messages": _sources(".tools[]"),
    "beta": {
        **_sources(
            ".messages[].content[](compaction).tool_changes[](tool_addition)"
            ".tool(tool_definition).definition"
        ),
        (".thread", "create"): "clients then send the whole conversation",
        (".thread", "continue"): "clients then send the whole conversation",
    },
}

_KINDS = ("computer", "shell", "apply_patch", "mcp", "file_search", "image_generation")
_MORE_KINDS = ("code_interpreter", "programmatic_tool_calling", "web_search_preview")
_OLD_KINDS = ("web_search_preview_2025_03_11",)
TOOLS = [FUNCTION, {"type": "custom", "name": "x"}] + [
    {"type": kind} for kind in (*_KINDS, *_MORE_KINDS, *_OLD_KINDS)
]


def read_response(body: dict[str, Any]) -> None:
    asked = {"input": [], "tools": TOOLS, **body}
    asked["input"] = [*asked["input"], {"role": "user", "content": "Hi"}]
    ResponsesRequest.parse(asked)


def read_chat(body: dict[str, Any]) -> None:
    functions = [{"type": "function", "function": {"name": "x"}}]
    ChatRequest.parse({"messages": [{"role": "user", "content": "Hi"}], "tools": functions, **body})


def read_message(body: dict[str, Any]) -> None:
    """Read a message of the user or, if that cannot be, one of the assistant."""
    (message,), more = body["messages"], [{"role": "user", "content": "Hi"}]
    try:
        MessagesRequest.parse({**body, "messages": [{**message, "role": "user"}, *more]})
    except UnknownFileError:
        raise
    except InvalidRequestError:
        MessagesRequest.parse({**body, "messages": [{**message, "role": "assistant"}, *more]})


@pytest.mark.parametrize(
    ("api", "root", "read"),
    [
        ("responses", responses.ResponseCreateParamsBase, read_response),
        ("chat", chats.CompletionCreateParamsBase, read_chat),
        ("messages", messages.MessageCreateParamsBase, read_message),
        ("beta", beta_messages.MessageCreateParamsBase, read_message),
    ],
)
def test_every_member_of_a_union_is_read(api: str, root: Any, read: Callable[[Any], None]) -> None:
    refused: dict[tuple[str, str], str] = {}
    found = list(variants(root, "", set()))
    for path, tag, value in found:
        try:
            read(value)
        except UnknownFileError:
            pass  # which the store then has, or has not
        except InvalidRequestError as error:
            refused[path, tag] = error.message
    assert len(found) > 15
    new = {key: why for key, why in refused.items() if key not in REFUSED[api]}
    assert new == {}
    assert REFUSED[api].keys() == refused.keys()
