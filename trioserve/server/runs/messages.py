"""The messages that a run adds to a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from trioserve.chat.deltas import Message, ToolCall

_MAX_QUOTED = 200


def read_arguments(text: str) -> dict[str, Any]:
    """Read the arguments of a call. Raises ValueError: they are no JSON object; it tells a model.

    No arguments at all are an empty object.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        quoted = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
        raise ValueError(f"The arguments are not JSON: {reason}. They were: {quoted}") from None
    if not isinstance(value, dict):
        raise ValueError("The arguments must be a JSON object.")
    return value


def assistant_message(message: Message, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """Write an answer of the model, with these of its calls, as the next prompt has it.

    Templates read arguments, and refuse what is no JSON object. What the model has written in its
    place is told by the result of the call.
    """
    written: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        written["reasoning_content"] = message.reasoning_content
    if listed := [_call(each) for each in calls]:
        written["tool_calls"] = listed
    return written


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        read_arguments(call.arguments)
        arguments = call.arguments or "{}"
    except ValueError:
        arguments = "{}"
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def tool_message(call: ToolCall, content: str) -> dict[str, Any]:
    """Write the result of a call."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
