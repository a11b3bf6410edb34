"""The deltas that the parser makes of generated text, and the message that they add up to."""

from __future__ import annotations

import attrs


@attrs.frozen
class ContentDelta:
    """New text of the answer."""

    text: str


@attrs.frozen
class ReasoningDelta:
    """New text of the reasoning."""

    text: str


@attrs.frozen
class ToolCallStart:
    """A tool call begins. `index` counts the calls of the message from 0."""

    index: int
    id: str
    name: str


@attrs.frozen
class ToolCallArguments:
    """More of the arguments of a call: a fragment of JSON text."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@attrs.frozen
class ToolCall:
    """A tool call. `arguments` is JSON text; cut short if the output was."""

    id: str
    name: str
    arguments: str


@attrs.frozen
class Message:
    """The assistant's message."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class MessageBuilder:
    """Builds a message from deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []

    def add(self, delta: Delta) -> None:
        """Take the next delta. Calls start in the order of their index."""
        match delta:
            case ContentDelta(text):
                self._content.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ToolCallStart(index):
                assert index == len(self._calls)
                self._calls.append((delta, []))
            case ToolCallArguments(index, text):
                self._calls[index][1].append(text)

    def build(self) -> Message:
        return Message(
            "".join(self._content),
            "".join(self._reasoning),
            tuple(
                ToolCall(start.id, start.name, "".join(arguments))
                for start, arguments in self._calls
            ),
        )
