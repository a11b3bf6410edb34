"""The base of the parsers of messages: a buffer, states, and the deltas that they find."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

import attrs

from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.parse.reader import CallReader

#: For each reasoning format: whether reasoning goes to a separate field, and whether it is in the
#: content, with its markers. All but "hidden" are llama-server's.
REASONING_FORMATS = {
    "none": (False, True),
    "auto": (True, False),
    "deepseek": (True, False),
    "deepseek-legacy": (True, True),
    "hidden": (False, False),
}

_SHORT_ID = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Make an unguessable id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """Make an id as some templates insist on: nine letters and digits."""
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))


class MessageParser:
    """Parses one message: a buffer, and a state that takes from it. Made by `message_parser`.

    A state is a method. Its argument says whether no more text comes. It takes what is certain from
    the buffer, may set another state, and returns whether to call the state again.

    Args:
        reasoning_format: one of `REASONING_FORMATS`.
        new_id: makes the ids of tool calls.
    """

    _step: Callable[[bool], bool]
    _reader: CallReader

    def __init__(self, reasoning_format: str, new_id: Callable[[], str]) -> None:
        self._has_field, self._shows_reasoning = REASONING_FORMATS[reasoning_format]
        self._new_id = new_id
        self._n_calls = 0
        self._deltas: list[Delta] = []
        self._buffer = ""
        self._skip = ""  # characters that are dropped until another one comes

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._buffer and self._step(False):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        while self._step(True):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _drop(self, count: int) -> str:
        dropped, self._buffer = self._buffer[:count], self._buffer[count:]
        return dropped

    def _skipped(self) -> int:
        return len(self._buffer) - len(self._buffer.lstrip(self._skip)) if self._skip else 0

    # -- what was found

    def _content(self, text: str) -> None:
        self._emit(ContentDelta(text))

    def _reasoning(self, text: str, raw: str) -> None:
        """Add to the reasoning; `raw` is how it was written, for content that shows it."""
        if self._has_field:
            self._emit(ReasoningDelta(text))
        self._raw_reasoning(raw)

    def _raw_reasoning(self, text: str) -> None:
        """Add reasoning as it was written, or a marker of it, to content that shows it."""
        if self._shows_reasoning:
            self._content(text)

    def _start_call(self, name: str) -> None:
        self._deltas.append(ToolCallStart(self._n_calls, self._new_id(), name))
        self._n_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(ToolCallArguments(self._n_calls - 1, text))

    def _emit(self, delta: ContentDelta | ReasoningDelta | ToolCallArguments) -> None:
        """Add a delta that is not empty, joined to the last one if that is of the same kind."""
        if not delta.text:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, type(delta)):
            self._deltas[-1] = attrs.evolve(delta, text=last.text + delta.text)
        else:
            self._deltas.append(delta)
