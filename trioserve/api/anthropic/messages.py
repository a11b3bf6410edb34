"""Anthropic's messages and tools, checked and brought into the normal form of `trioserve.chat`.

A message there is a list of blocks. Neighbours of one role are one turn. What a tool returned
becomes a message of its own, and thinking becomes `reasoning_content`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from trioserve.api.anthropic.blocks import (
    KINDS,
    Block,
    Part,
    as_content,
    blocks_of,
    content_of,
    parts_of,
    text_of,
    texts_of,
    unsupported,
)
from trioserve.api.base import sse
from trioserve.api.base.fields import (
    MismatchError,
    boolean,
    json_type,
    mapping,
    named,
    objects,
    one_of,
    required,
    text,
)
from trioserve.chat.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Message,
    Messages,
    Tools,
    check_count,
)
from trioserve.errors import InvalidRequestError, UnsupportedFieldError

#: Stands before the result of a tool that failed, as templates have no field for that.
ERROR_MARK = "Error: "


# -- thinking that was not shown

_SIGNATURE = "trioserve"


def sign(thinking: str, *, shown: bool) -> str:
    """Make the signature of a thinking block; it carries the thinking where that is not shown."""
    if shown:
        return _SIGNATURE
    return f"{_SIGNATURE}.{base64.b64encode(thinking.encode()).decode()}"


def _signed(signature: str) -> str:
    """Read the thinking that a signature of ours carries. That of another maker is sealed."""
    head, _, data = signature.partition(".")
    try:
        return base64.b64decode(data, validate=True).decode() if head == _SIGNATURE else ""
    except (binascii.Error, UnicodeDecodeError):
        raise MismatchError("as it was received") from None


# -- messages


_BLOCKS = {"type": ["string", "array"], "items": {"type": "object"}, "maxItems": MAX_PARTS}


@json_type(
    properties={
        "system": _BLOCKS,
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": _BLOCKS,
                },
                "required": ["role", "content"],
            },
        },
    }
)
def read_messages(body: Mapping[str, Any]) -> Messages:
    """Read ``system`` and ``messages`` of a request.

    Raises:
        UnsupportedFieldError: a block is of a kind that this server cannot read.
        InvalidRequestError: something is missing or has the wrong type. Both name it.
    """
    messages: list[Message] = []
    if (system := body.get("system")) is not None:
        messages.append({"role": "system", "content": _system(system)})
    names: dict[str, str] = {}
    for role, blocks in _turns(required(body, "messages", objects)):
        if role == "assistant":
            messages.append(_assistant(blocks, names))
        else:
            messages += _user(role, blocks, names)
    return Messages(messages)


@json_type()
def continues_final_message(body: Mapping[str, Any]) -> bool:
    """Whether the last message, which `read_messages` has checked, is the assistant's to continue.

    Raises:
        InvalidRequestError: it calls a tool, and so waits for a result.
    """
    if body.get("continue_final_message") is False:  # as the configuration may have it
        return False
    messages = body["messages"]
    if messages[-1]["role"] != "assistant":
        return False
    for path, block in blocks_of(messages[-1]["content"], f"messages[{len(messages) - 1}].content"):
        if block["type"] == "tool_use":
            raise InvalidRequestError(f"'{path}' needs a 'tool_result' after it.", param=path)
    return True


_ROLE = one_of("user", "assistant", "system")


def _turns(messages: tuple[dict[str, Any], ...]) -> list[tuple[str, list[Block]]]:
    """Gather the blocks of messages, those of neighbours with one role together."""
    if not messages:
        raise InvalidRequestError("'messages' must not be empty.", param="messages")
    check_count(len(messages), MAX_MESSAGES, "messages", "messages")
    turns: list[tuple[str, list[Block]]] = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        role = required(message, "role", _ROLE, path)
        blocks = blocks_of(required(message, "content", content_of, path), f"{path}.content")
        if turns and turns[-1][0] == role:
            _part(turns[-1][1], blocks)
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _part(before: list[Block], after: list[Block]) -> None:
    """Put an empty line between two messages that become one, where text meets text."""
    if before and after and before[-1][1].get("type") == after[0][1].get("type") == "text":
        path, last = before[-1]
        before[-1] = (path, {**last, "text": text_of(last, path) + "\n\n"})


#: A head that some clients put before a system prompt, with a number that changes each time.
_BILLING = re.compile(r"\A(x-anthropic-billing-header:[^\n]*?cch=)[^;\n]{5}(?=;)")


def _system(value: Any) -> str:
    """Read a system prompt. What would keep its prefix from being found again is made constant."""
    blocks = blocks_of(named(content_of, value, "system"), "system")
    texts = texts_of(blocks, "a system prompt")
    return "".join(_BILLING.sub(r"\1fffff", each) for each in texts)


def _assistant(blocks: list[Block], names: dict[str, str]) -> dict[str, Any]:
    """Read a turn of the assistant, and note the names of the tools that it calls by their ids."""
    said: list[Part] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in blocks:
        match required(block, "type", text, path):
            case "text":
                said.append({"type": "text", "text": text_of(block, path)})
            case "thinking":
                thinking.append(_thinking(block, path))
            case "redacted_thinking":
                thinking.append(required(block, "data", lambda data: _signed(text(data)), path))
            case "tool_use":
                calls.append(_call(block, path))
                names[calls[-1]["id"]] = calls[-1]["function"]["name"]
            case kind:
                raise unsupported(kind, path, "a message of the assistant")
    message: dict[str, Any] = {"role": "assistant", "content": as_content(said)}
    if calls:
        message["tool_calls"] = calls
    if reasoning := "".join(thinking):
        message["reasoning_content"] = reasoning
    return message


def _thinking(block: Mapping[str, Any], path: str) -> str:
    shown = required(block, "thinking", text, path)
    return shown or named(
        lambda value: _signed(text(value or "")), block.get("signature"), f"{path}.signature"
    )


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = {
        "name": required(block, "name", _filled, path),
        "arguments": sse.encode(required(block, "input", mapping, path)),
    }
    return {"id": required(block, "id", text, path), "type": "function", "function": function}


def _user(role: str, blocks: list[Block], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Read a turn of the user or the system: results of tools and what is said, in their order."""
    messages: list[dict[str, Any]] = []
    said: list[Part] = []
    owner, kinds = f"a message of the {role}", KINDS if role == "user" else ("text",)

    def say() -> None:
        if said:
            messages.append({"role": role, "content": as_content(said.copy())})
            said.clear()

    for path, block in blocks:
        if block.get("type") == "tool_result" and role == "user":
            say()
            messages.append(_result(block, path, names))
        else:
            said += parts_of([(path, block)], owner, kinds)
    say()
    return messages


def _result(block: Mapping[str, Any], path: str, names: Mapping[str, str]) -> dict[str, Any]:
    id_ = required(block, "tool_use_id", text, path)
    given, where = block.get("content"), f"{path}.content"
    blocks = [] if given is None else blocks_of(named(content_of, given, where), where)
    parts = parts_of(blocks, "the result of a tool")
    failed = block.get("is_error")
    if failed is not None and named(boolean, failed, f"{path}.is_error"):
        parts.insert(0, {"type": "text", "text": ERROR_MARK})
    content: str | list[Part] = parts
    if all(each["type"] == "text" for _, each in blocks):
        content = "".join(part["text"] for part in parts)
    message = {"role": "tool", "tool_call_id": id_, "content": content}
    return {**message, "name": names[id_]} if id_ in names else message


# -- tools

#: Fields of a tool that have no effect, and the only value that asks for none.
_NEUTRAL_IN_TOOLS: Mapping[str, Any] = {
    "allowed_callers": ["direct"],
    "defer_loading": False,
    "input_examples": [],
}


@json_type(
    {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "description": {"type": ["string", "null"]},
                "input_schema": {"type": "object"},
            },
            "required": ["name", "input_schema"],
        },
    }
)
def read_tools(value: Any) -> Tools:
    """Read ``tools``: functions that the client runs.

    Raises:
        MismatchError: it is no list of objects.
        UnsupportedFieldError: a tool would have to be run by the server.
        InvalidRequestError: something is missing or has the wrong type. Both name it.
    """
    given = objects(value)
    check_count(len(given), MAX_TOOLS, "tools", "tools")
    return Tools(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind is not None and kind != "custom":
        raise UnsupportedFieldError(
            f"'{path}.type' is {kind!r}: this server has no tools of its own.",
            param=f"{path}.type",
        )
    for name, neutral in _NEUTRAL_IN_TOOLS.items():
        if tool.get(name) not in (None, neutral):
            raise UnsupportedFieldError(
                f"'{path}.{name}' is not supported with this value; leave it out.",
                param=f"{path}.{name}",
            )
    description = "" if tool.get("description") is None else tool["description"]
    function: dict[str, Any] = {
        "name": required(tool, "name", _filled, path),
        "description": named(text, description, f"{path}.description"),
        "parameters": required(tool, "input_schema", mapping, path),
    }
    if tool.get("strict") is not None:
        function["strict"] = named(boolean, tool["strict"], f"{path}.strict")
    return {"type": "function", "function": function}


def _filled(value: Any) -> str:
    if not text(value):
        raise MismatchError("a string, and not empty")
    return str(value)
