"""The messages and tools of a request, checked and brought into the one form templates get.

A message in normal form is a dict with

* ``role``: text,
* ``content``: text, or a list of ``{"type": "text", "text": …}``,
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

from trioserve.errors import InvalidRequestError, UnsupportedFieldError

#: The roles that every client may use. Others must be known to the model's template.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

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
        UnsupportedFieldError: a content part is not text, or a call not of a function.
        InvalidRequestError: something is missing or of the wrong type.
        Both name the field in `param`, such as ``messages[2].content[0].text``.
    """
    if isinstance(messages, Messages):
        return messages
    given = _list(messages, path, "a list of messages")
    if not given:
        raise InvalidRequestError(f"'{path}' must not be empty.", param=path)
    return Messages(_parse_message(message, f"{path}[{i}]") for i, message in enumerate(given))


def parse_tools(tools: object, path: str = "tools") -> Tools:
    """Check OpenAI's list of tools. A function without parameters gets an empty schema.

    Raises:
        UnsupportedFieldError: a tool is not a function.
        InvalidRequestError: something is missing or of the wrong type; `param` names it.
    """
    if isinstance(tools, Tools):
        return tools
    given = () if tools is None else _list(tools, path, "a list of tools")
    return Tools(_parse_tool(tool, f"{path}[{i}]") for i, tool in enumerate(given))


def _parse_tool(tool: object, path: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(f"'{path}' must be an object.", param=path)
    if tool.get("type") != "function":
        raise UnsupportedFieldError(f"'{path}.type' must be \"function\".", param=f"{path}.type")
    function = _mapping(tool.get("function"), f"{path}.function")
    _text(function.get("name"), f"{path}.function.name", filled=True)
    if function.get("description") is not None:
        _text(function["description"], f"{path}.function.description")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    parameters = _mapping(parameters, f"{path}.function.parameters")
    kept = {key: value for key, value in function.items() if value is not None}
    return {**tool, "function": {**kept, "parameters": dict(parameters)}}


def _parse_message(message: object, path: str) -> Message:
    fields = {key: value for key, value in _mapping(message, path).items() if value is not None}
    role = _text(fields.get("role"), f"{path}.role", filled=True)
    if fields.get("function_call"):
        raise UnsupportedFieldError(
            f"'{path}.function_call' is not supported; use 'tool_calls'.",
            param=f"{path}.function_call",
        )
    calls = fields.pop("tool_calls", None)
    if calls and role != "assistant":
        raise InvalidRequestError(
            f"'{path}.tool_calls' belongs to a message of the assistant.",
            param=f"{path}.tool_calls",
        )
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in fields:
            _text(fields[name], f"{path}.{name}")
    if "content" in fields:
        fields["content"] = _parse_content(fields["content"], f"{path}.content")
    elif role == "assistant" and (calls is not None or "reasoning_content" in fields):
        fields["content"] = ""
    else:
        raise InvalidRequestError(f"'{path}.content' is missing.", param=f"{path}.content")
    if not fields.get("reasoning_content"):
        fields.pop("reasoning_content", None)
    if calls:
        fields["tool_calls"] = _parse_calls(calls, f"{path}.tool_calls")
    return fields


def _parse_content(content: object, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = _list(content, path, "text or a list of content parts")
    return [_parse_part(part, f"{path}[{i}]") for i, part in enumerate(parts)]


def _parse_part(part: object, path: str) -> dict[str, Any]:
    fields = _mapping(part, path)
    kind = _text(fields.get("type"), f"{path}.type", filled=True)
    if kind == "refusal":
        return {"type": "text", "text": _text(fields.get("refusal"), f"{path}.refusal")}
    if kind != "text":
        raise UnsupportedFieldError(
            f"'{path}.type' is {kind!r}: only text can be given to this model.",
            param=f"{path}.type",
        )
    return {"type": "text", "text": _text(fields.get("text"), f"{path}.text")}


def _parse_calls(calls: object, path: str) -> list[dict[str, Any]]:
    given = _list(calls, path, "a list of tool calls")
    return [_parse_call(call, f"{path}[{i}]") for i, call in enumerate(given)]


def _parse_call(call: object, path: str) -> dict[str, Any]:
    fields = _mapping(call, path)
    if fields.get("type", "function") != "function":
        raise UnsupportedFieldError(f"'{path}.type' must be \"function\".", param=f"{path}.type")
    function = _mapping(fields.get("function"), f"{path}.function")
    name = _text(function.get("name"), f"{path}.function.name", filled=True)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is None or arguments == "":
        arguments = "{}"
    parsed: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": name,
            "arguments": _text(arguments, f"{path}.function.arguments"),
        },
    }
    if fields.get("id") is not None:
        parsed = {"id": _text(fields["id"], f"{path}.id"), **parsed}
    return parsed


def _list(value: object, path: str, expected: str) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"'{path}' must be {expected}.", param=path)
    return value


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        problem = "is missing" if value is None else "must be an object"
        raise InvalidRequestError(f"'{path}' {problem}.", param=path)
    return value


def _text(value: object, path: str, *, filled: bool = False) -> str:
    if not isinstance(value, str):
        problem = "is missing" if value is None else "must be text"
        raise InvalidRequestError(f"'{path}' {problem}.", param=path)
    if filled and not value:
        raise InvalidRequestError(f"'{path}' must not be empty.", param=path)
    return value


def join_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join the text of content parts, one part a line, as llama-server does."""
    return "\n".join(part["text"] for part in parts if part["text"])
