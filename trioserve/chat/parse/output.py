"""Collects what the parsers of messages find, as deltas."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)


class Output:
    """Deltas in the order of the text; those of the same kind are joined.

    Args:
        to_reasoning: whether reasoning goes to a field of its own.
        to_content: whether reasoning, with its markers, is in the content.
        new_id: makes the ids of tool calls.
    """

    def __init__(self, to_reasoning: bool, to_content: bool, new_id: Callable[[], str]) -> None:
        self.to_reasoning = to_reasoning
        self.to_content = to_content
        self._new_id = new_id
        self._calls = 0
        self._deltas: list[Delta] = []

    def take(self) -> list[Delta]:
        """Give the deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def content(self, text: str) -> None:
        """Add to the content."""
        if text:
            self._emit(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        """Add to the reasoning, if that has a field of its own."""
        if text and self.to_reasoning:
            self._emit(ReasoningDelta(text))

    def raw_reasoning(self, text: str) -> None:
        """Add reasoning as it was written, or a marker of it, to content that shows it."""
        if self.to_content:
            self.content(text)

    def start_call(self, name: str) -> None:
        """Begin a tool call."""
        self._emit(ToolCallStart(self._calls, self._new_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if text:
            self._emit(ToolCallArguments(self._calls - 1, text))

    def _emit(self, delta: Delta) -> None:
        match delta, self._deltas[-1:]:
            case ContentDelta(more), [ContentDelta(text)]:
                self._deltas[-1] = ContentDelta(text + more)
            case ReasoningDelta(more), [ReasoningDelta(text)]:
                self._deltas[-1] = ReasoningDelta(text + more)
            case ToolCallArguments(index, more), [ToolCallArguments(_, text)]:
                self._deltas[-1] = ToolCallArguments(index, text + more)
            case _:
                self._deltas.append(delta)
