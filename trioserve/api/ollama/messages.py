"""Ollama's messages, brought into the normal form of `trioserve.chat`.

They are OpenAI's but for a few names. Calls may come without ids, and results with no more than
the name of their tool; templates need both to have an id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from trioserve.api.base.fields import json_type, named, objects, required, strings, text
from trioserve.chat.documents import text_part
from trioserve.chat.media_parts import media_part, source_of
from trioserve.chat.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Message,
    Messages,
    Tools,
    check_count,
    parse_messages,
    parse_tools,
)
from trioserve.errors import InvalidRequestError

#: Fields of a message that have other names in the normal form.
_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}

#: Stands for an image in a text.
_PLACE = "[img]"

_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["object", "string"]}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
        "content": {"type": ["string", "null"]},
        "thinking": {"type": ["string", "null"]},
        "images": {"type": ["array", "null"], "items": {"type": "string"}, "maxItems": MAX_PARTS},
        "tool_calls": {"type": ["array", "null"], "items": _CALL, "maxItems": MAX_PARTS},
        "tool_name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role"],
}


@json_type({"type": "array", "items": _MESSAGE, "maxItems": MAX_MESSAGES})
def read_messages(value: Any) -> Messages:
    """Read `messages`; there may be none.

    Raises:
        MismatchError: it is no list of objects.
        InvalidMediaError: an image is not valid base64.
        InvalidRequestError: something is missing or has the wrong type. Both name it.
    """
    given = objects(value)
    check_count(len(given), MAX_MESSAGES, "messages", "messages")
    if not given:
        return Messages()
    renamed = [_renamed(message, f"messages[{i}]") for i, message in enumerate(given)]
    return _with_ids(parse_messages(renamed))


def _renamed(message: Mapping[str, Any], path: str) -> Message:
    fields = {name: value for name, value in message.items() if name not in (*_NAMES, "images")}
    for theirs, ours in _NAMES.items():
        if (value := message.get(theirs)) is not None:
            fields[ours] = named(text, value, f"{path}.{theirs}")
    if fields.get("content") is None:
        fields["content"] = ""
    if (given := message.get("images")) is not None:
        images = named(strings, given, f"{path}.images")
        content = required(fields, "content", text, path)
        fields["content"] = with_images(content, images, f"{path}.images")
    return fields


def with_images(said: str, images: Sequence[str], path: str) -> str | list[dict[str, Any]]:
    """Make the content of a message. As in Ollama, images stand where the text says ``[img]``.

    Those for which there is no such place stand before the text.

    Raises:
        InvalidMediaError: an image is not valid base64; `param` names it.
    """
    if not images:
        return said
    check_count(len(images), MAX_PARTS, path, "images")
    parts = [
        media_part(source_of(image, "image", f"{path}[{i}]")) for i, image in enumerate(images)
    ]
    texts = said.split(_PLACE, len(parts))
    n_placed = len(texts) - 1
    content = parts[n_placed:]
    for piece, image in zip_longest(texts, parts[:n_placed]):
        content += [text_part(piece)] if piece else []
        content += [] if image is None else [image]
    return content


def _with_ids(messages: Messages) -> Messages:
    """Give an id to calls that have none, and to results: that of the call that they answer."""
    written: list[Message] = []
    unanswered: list[tuple[str, str]] = []  # the name and the id of each call
    n_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            # Nine letters and digits: some templates take no other ids.
            calls = [
                {"id": f"call{i:05d}", **call} for i, call in enumerate(calls, start=n_calls + 1)
            ]
            n_calls += len(calls)
            unanswered = [(call["function"]["name"], call["id"]) for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and unanswered:
            message = _answering(message, unanswered)
        written.append(message)
    return Messages(written)


def _answering(message: Message, unanswered: list[tuple[str, str]]) -> Message:
    """Find the call that a result belongs to, and take it from the list."""
    id_, name = message.get("tool_call_id"), message.get("name")
    found = next(
        (one for one in unanswered if (one[1] == id_ if id_ else name in (None, one[0]))), None
    )
    if found is None:
        return message
    unanswered.remove(found)
    return {"name": found[0], "tool_call_id": found[1], **message}


@json_type()
def continues_final_message(body: Mapping[str, Any]) -> bool:
    """Whether the last message, which `read_messages` has checked, is the assistant's to continue.

    Raises:
        InvalidRequestError: it calls a tool, and so waits for a result.
    """
    messages = body.get("messages")
    if body.get("continue_final_message") is False or not messages:  # as the configuration has it
        return False
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        path = f"messages[{len(messages) - 1}]"
        raise InvalidRequestError(f"'{path}' calls a tool, and needs its result.", param=path)
    return bool(last["role"] == "assistant")


# -- tools

_TOOL = {
    "type": "object",
    "properties": {
        "type": {"type": ["string", "null"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}


@json_type({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS})
def read_tools(value: Any) -> Tools:
    """Read `tools`; their type may be left out, as there is only one.

    Raises:
        MismatchError: it is no list of objects.
        InvalidRequestError: something is missing or has the wrong type; `param` names it.
    """
    return parse_tools(
        [{**tool, "type": tool.get("type") or "function"} for tool in objects(value)]
    )
