"""The messages and tools of a request, checked and brought into the one form templates get.

A message in normal form is a dict with

* ``role``: text,
* ``content``: text, or a list of ``{"type": "text", "text": …}`` and of
  ``{"type": "media", "media": MediaSource(…)}``; and, until `trioserve.server` has read them, of
  ``{"type": "document", "document": DocumentSource(…)}``,
* on an assistant's message, when it has any, ``tool_calls``: a list of ``{"id", "type":
  "function", "function": {"name", "arguments"}}`` with the arguments as JSON text, and
  ``reasoning_content``: text,
* on a tool's message ``tool_call_id`` and ``name``, when given,
* whatever else the client sent that is not null: some templates know fields of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trioserve.chat.content_parts import Attachment, media_part, parse_media_part
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.types import DocumentSource, MediaSource

#: The roles that every client may use. Others must be known to the model's template.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

#: How many messages a chat may have, how many tools, and how many parts or calls a message.
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_PARTS = 1024

#: Characters of the arguments of a call, as JSON.
MAX_ARGUMENTS = 2**20

Message = dict[str, Any]
Tool = dict[str, Any]


class Messages(tuple[Message, ...]):
    """Messages in normal form: what `parse_messages` makes, and takes as it is."""

    __slots__ = ()


class Tools(tuple[Tool, ...]):
    """Tools that have been checked: what `parse_tools` makes, and takes as it is."""

    __slots__ = ()


def parse_messages(messages: object, path: str = "messages") -> Messages:
    """Bring OpenAI's chat messages into normal form.

    Raises:
        UnsupportedFieldError: a content part is of a kind that is not known, or a call not of a
            function.
        InvalidMediaError: an image, sound or a video is not where the message says.
        InvalidRequestError: something is missing or of the wrong type.
        All name the field in `param`, such as ``messages[2].content[0].text``.
    """
    if isinstance(messages, Messages):
        return messages
    given = _list(messages, path, "messages", MAX_MESSAGES)
    if not given:
        raise _invalid(path, "must not be empty")
    return Messages(_parse_message(message, f"{path}[{i}]") for i, message in enumerate(given))


def parse_tools(tools: object, path: str = "tools") -> Tools:
    """Check OpenAI's list of tools. A function without parameters gets an empty schema.

    Raises:
        UnsupportedFieldError: a tool is not a function.
        InvalidRequestError: something is missing or of the wrong type; `param` names it.
    """
    if isinstance(tools, Tools):
        return tools
    given = () if tools is None else _list(tools, path, "tools", MAX_TOOLS)
    return Tools(_parse_tool(tool, f"{path}[{i}]") for i, tool in enumerate(given))


def _parse_tool(tool: object, path: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise _invalid(path, "must be an object")
    if tool.get("type") != "function":
        raise _unsupported(f"{path}.type", 'must be "function"')
    path = f"{path}.function"
    function = _mapping(tool.get("function"), path)
    _text(function, "name", path, filled=True)
    if function.get("description") is not None:
        _text(function, "description", path)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    parameters = _mapping(parameters, f"{path}.parameters")
    kept = {key: value for key, value in function.items() if value is not None}
    return {**tool, "function": {**kept, "parameters": dict(parameters)}}


def _parse_message(message: object, path: str) -> Message:
    fields = {key: value for key, value in _mapping(message, path).items() if value is not None}
    role = _text(fields, "role", path, filled=True)
    if fields.get("function_call"):
        raise _unsupported(f"{path}.function_call", "is not supported; use 'tool_calls'")
    calls = fields.pop("tool_calls", None)
    if calls and role != "assistant":
        raise _invalid(f"{path}.tool_calls", "belongs to a message of the assistant")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in fields:
            _text(fields, name, path)
    if "content" in fields:
        fields["content"] = _parse_content(fields["content"], path)
    elif role == "assistant" and (calls is not None or "reasoning_content" in fields):
        fields["content"] = ""
    else:
        raise _invalid(f"{path}.content", "is missing")
    if not fields.get("reasoning_content"):
        fields.pop("reasoning_content", None)
    if calls:
        given = _list(calls, f"{path}.tool_calls", "tool calls", MAX_PARTS)
        fields["tool_calls"] = [
            _parse_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(given)
        ]
    return fields


def _parse_content(content: object, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    path = f"{path}.content"
    parts = _list(content, path, "content parts", MAX_PARTS, "text or ")
    return [_parse_part(part, f"{path}[{i}]") for i, part in enumerate(parts)]


def _parse_part(part: object, path: str) -> dict[str, Any]:
    if isinstance(part, Attachment):
        return media_part(part.source(path))
    fields = _mapping(part, path)
    kind = _text(fields, "type", path, filled=True)
    if kind in ("text", "refusal"):
        return {"type": "text", "text": _text(fields, kind, path)}
    if kind == "media" and isinstance(fields.get("media"), MediaSource):
        return media_part(fields["media"])
    if kind == "document" and isinstance(fields.get("document"), DocumentSource):
        return {"type": "document", "document": fields["document"]}
    if (media := parse_media_part(kind, fields, path)) is None:
        raise _unsupported(f"{path}.type", f"is {kind!r:.80}, which is not known here")
    return media


def _parse_call(call: object, path: str) -> dict[str, Any]:
    fields = _mapping(call, path)
    if fields.get("type", "function") != "function":
        raise _unsupported(f"{path}.type", 'must be "function"')
    function = _mapping(fields.get("function"), f"{path}.function")
    name = _text(function, "name", f"{path}.function", filled=True)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(arguments, str):
        raise _invalid(f"{path}.function.arguments", "must be text or an object")
    check_count(len(arguments), MAX_ARGUMENTS, f"{path}.function.arguments", "characters")
    parsed: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return parsed if fields.get("id") is None else {"id": _text(fields, "id", path), **parsed}


# -- values of fields. `path` is where the value, or the object that has it, is in the request.


def _text(fields: Mapping[str, Any], name: str, path: str, *, filled: bool = False) -> str:
    value = fields.get(name)
    if isinstance(value, str) and (value or not filled):
        return value
    problem = "is missing" if value is None else "must be text"
    raise _invalid(f"{path}.{name}", "must not be empty" if value == "" else problem)


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if isinstance(value, (dict, Mapping)):  # to tell that it is a dict is quick
        return value
    raise _invalid(path, "is missing" if value is None else "must be an object")


def _list(value: object, path: str, what: str, limit: int, instead: str = "") -> Sequence[object]:
    if not isinstance(value, (list, Sequence)) or isinstance(value, str | bytes):
        raise _invalid(path, f"must be {instead}a list of {what}")
    check_count(len(value), limit, path, what)
    return value


def check_count(n: int, limit: int, path: str, what: str) -> None:
    """Refuse more of something than there may be. Raises InvalidRequestError, naming `path`."""
    if n > limit:
        raise _invalid(path, f"has {n} {what}, and {limit} are allowed")


def _invalid(path: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{path}' {problem}.", param=path)


def _unsupported(path: str, problem: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(f"'{path}' {problem}.", param=path)


def join_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join the text of content parts, one part a line, as llama-server does."""
    return "\n".join(part["text"] for part in parts if part["text"])
