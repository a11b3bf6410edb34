"""Tools for models whose template has no place for them: calls and results as plain text.

The model is told of its tools in the system message, and writes calls as `GENERIC` describes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trioserve.chat.messages import Message, Tool, join_text

_INSTRUCTIONS = """\
You can call these functions:
{tools}

To call some, write nothing but JSON in this form:
{{"tool_calls": [{{"name": "<name>", "arguments": {{<arguments>}}}}]}}
Their results come in the next message. When you need none, answer in plain words."""


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Tell the model of its tools in the first system message, or in one before all others."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    told = _INSTRUCTIONS.format(tools="\n".join(lines))
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": told}, *messages]
    content = f"{as_text(first['content'])}\n\n{told}"
    return [{**first, "content": content}, *messages[1:]]


def with_calls_as_text(message: Message) -> Message:
    """Write the tool calls of a message as the model would have written them."""
    calls = [
        f'{{"name": {_quoted(call["function"]["name"])}, '
        f'"arguments": {call["function"]["arguments"]}}}'
        for call in message["tool_calls"]
    ]
    text = f'{{"tool_calls": [{", ".join(calls)}]}}'
    content = as_text(message["content"])
    told = {**message, "content": f"{content}\n\n{text}" if content else text}
    del told["tool_calls"]
    return told


def with_result_as_text(message: Message) -> Message:
    """Write the result of a tool as a message of the user."""
    result: dict[str, Any] = {"result": as_text(message["content"])}
    for field in ("name", "tool_call_id"):
        if field in message:
            result[field] = message[field]
    text = json.dumps({"tool_response": result}, ensure_ascii=False)
    return {"role": "user", "content": text}


def merged(messages: Sequence[tuple[int, Message]]) -> list[tuple[int, Message]]:
    """Join messages of the user that follow each other: many templates insist on turns."""
    joined: list[tuple[int, Message]] = []
    for place, message in messages:
        if joined and message["role"] == "user" == joined[-1][1]["role"]:
            before = joined[-1][1]
            content = f"{as_text(before['content'])}\n\n{as_text(message['content'])}"
            joined[-1] = joined[-1][0], {**before, "content": content}
        else:
            joined.append((place, message))
    return joined


def as_text(content: Any) -> str:
    """Give the text of a content that may be a list of parts."""
    return content if isinstance(content, str) else join_text(content)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
