"""The messages that a run adds to a chat, and calls of tools that fail alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trioserve.chat.deltas import Message, ToolCall
from trioserve.errors import TrioServeError
from trioserve.log import get_logger
from trioserve.tools.tool import Tool, ToolCallContext, ToolResult


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Raises ValueError, with a message for the model.

    Empty text means an empty object. The message repeats nothing of the text: what it has counts as
    seen by the model.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"The arguments are not JSON: {reason}.") from None
    if not isinstance(value, dict):
        raise ValueError("The arguments must be a JSON object.")
    return value


def assistant_message(message: Message, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """Build the message of an answer of the model, with some of its calls, for the next prompt.

    Templates accept only JSON objects as arguments. The result of a call quotes invalid arguments.
    """
    written: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        written["reasoning_content"] = message.reasoning_content
    if listed := [_in_openai_form(each) for each in calls]:
        written["tool_calls"] = listed
    return written


def _in_openai_form(call: ToolCall) -> dict[str, Any]:
    try:
        read_arguments(call.arguments)
        arguments = call.arguments or "{}"
    except ValueError:
        arguments = "{}"
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def tool_message(call: ToolCall, content: str) -> dict[str, Any]:
    """Build the message with the result of a call."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


_log = get_logger("trioserve.tools")


async def call_tool(
    tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext
) -> ToolResult:
    """Call a tool. Exceptions become error results for the model."""
    try:
        return await tool.call(arguments, context)
    except TrioServeError as error:
        return ToolResult.of_error(error.message)
    except Exception as error:
        _log.warning("a tool has failed", tool=tool.info.name, exc_info=error)
        return ToolResult.of_error(f"The tool has failed with {type(error).__name__}: {error}")


async def preview_of(
    tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext
) -> str | None:
    """Say what a call would change, if the tool can; None: it cannot."""
    try:
        return await tool.preview(arguments, context)
    except Exception as error:  # ask for approval without a preview
        _log.warning("a tool has no preview", tool=tool.info.name, exc_info=error)
        return None
