"""Takes generated text apart, piece by piece, into content, reasoning and tool calls.

The result does not depend on how the text is split: text is held back only while it could still
become a marker, or whitespace that goes with one. Nothing is thrown away but markers, the
whitespace around them, and the JSON skeleton around a call's name and arguments: what begins like
a tool call and turns out not to be one comes out as content.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from trioserve.chat.calls import JsonCallReader
from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.formats import ChatFormat, Reasoning, ToolCalls
from trioserve.chat.json_scanner import WHITESPACE, State
from trioserve.errors import InvalidRequestError

#: For each of llama-server's reasoning formats: whether reasoning goes to a field of its own, and
#: whether it is in the content, with its markers.
REASONING_FORMATS = {
    "none": (False, True),
    "auto": (True, False),
    "deepseek": (True, False),
    "deepseek-legacy": (True, True),
}


def new_call_id() -> str:
    """Make an id for a tool call that nobody can guess."""
    return f"call_{secrets.token_hex(12)}"


class MessageParser:
    """Parses one message.

    Args:
        format: how the model writes.
        parse_tools: whether to look for tool calls; without, they are content.
        reasoning_format: "none", "auto", "deepseek" or "deepseek-legacy", as in llama-server.
        prompt_tail: the end of the prompt, which tells whether it has begun the reasoning.
        new_id: makes the ids of tool calls.

    Raises:
        InvalidRequestError: there is no such reasoning format.
    """

    def __init__(
        self,
        format: ChatFormat,
        *,
        parse_tools: bool,
        reasoning_format: str = "auto",
        prompt_tail: str = "",
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        if reasoning_format not in REASONING_FORMATS:
            raise InvalidRequestError(
                f"'reasoning_format' must be one of {', '.join(REASONING_FORMATS)}.",
                param="reasoning_format",
            )
        self._to_reasoning, self._to_content = REASONING_FORMATS[reasoning_format]
        self._tools: ToolCalls | None = format.tool_calls if parse_tools else None
        self._new_id = new_id
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._skip = ""  # characters that are dropped until another one comes
        self._raw = ""  # what has been read of a call before its name was known
        self._reader: JsonCallReader | None = None
        self._started = False  # whether the call's name is out
        self._calls = 0
        self._step: Callable[[bool], bool] = self._in_content
        if format.reasoning is not None:
            self._begin(format.reasoning, prompt_tail.rstrip(WHITESPACE))

    def _begin(self, reasoning: Reasoning, prompt: str) -> None:
        self._reasoning = reasoning
        self._step = self._at_start
        if prompt.endswith(reasoning.start):
            self._skip = "\n"
            self._step = self._in_reasoning
            if self._to_reasoning and self._to_content:
                self._content(reasoning.start)
        elif prompt.endswith(reasoning.end) and not self._to_content:
            self._skip = "\n"

    def feed(self, text: str) -> list[Delta]:
        """Take more text; gives what is now certain."""
        self._buffer += text
        while self._buffer and self._step(False):
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """Say that no more text comes; gives what was held back."""
        while self._step(True):
            pass
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # -- output

    def _emit(self, delta: Delta) -> None:
        """Add a delta, to the last one if that is of the same kind."""
        match delta, self._deltas[-1:]:
            case ContentDelta(more), [ContentDelta(text)]:
                self._deltas[-1] = ContentDelta(text + more)
            case ReasoningDelta(more), [ReasoningDelta(text)]:
                self._deltas[-1] = ReasoningDelta(text + more)
            case _:
                self._deltas.append(delta)

    def _content(self, text: str) -> None:
        if text:
            self._emit(ContentDelta(text))

    def _drop(self, count: int) -> str:
        """Take characters off the buffer."""
        dropped, self._buffer = self._buffer[:count], self._buffer[count:]
        return dropped

    # -- states: each takes from the buffer, and says whether to go on

    def _at_start(self, final: bool) -> bool:
        """Look for the marker of reasoning, before anything else."""
        start = self._reasoning.start
        text = self._buffer.lstrip(WHITESPACE)
        if text.startswith(start):
            whole = self._drop(len(self._buffer) - len(text) + len(start))
            if self._to_content:
                self._content(whole)
            self._skip = "\n"
            self._step = self._in_reasoning
            return True
        if not final and start.startswith(text):
            return False
        self._step = self._in_content
        return True

    def _in_reasoning(self, final: bool) -> bool:
        end = self._reasoning.end
        body_at = self._skipped()
        if body_at == len(self._buffer) and not final:
            self._reason(body_at, body_at, body_at)
            return False
        found = self._buffer.find(end, body_at)
        if found >= 0:
            self._reason(body_at, _without_newlines(self._buffer, body_at, found), found)
            marker = self._drop(len(end))
            if self._to_content:
                self._content(marker)
            self._skip = "" if self._to_content else "\n"
            self._step = self._in_content
            return True
        until = len(self._buffer) if final else _safe(self._buffer, end, body_at)
        self._reason(body_at, until, until)
        if until > body_at:
            self._skip = ""
        return False

    def _reason(self, start: int, stop: int, until: int) -> None:
        """Take the buffer up to `until`; the reasoning in it is from `start` to `stop`."""
        text = self._drop(until)
        if self._to_reasoning and start < stop:
            self._emit(ReasoningDelta(text[start:stop]))
        if self._to_content:
            self._content(text)

    def _in_content(self, final: bool) -> bool:
        self._drop(self._skipped())
        if not self._buffer:
            return False
        if self._tools is None:
            self._skip = ""
            self._content(self._drop(len(self._buffer)))
            return False
        start = self._tools.start
        found = self._buffer.find(start)
        if found >= 0:
            self._content(self._drop(_without_newlines(self._buffer, 0, found)))
            self._raw = self._drop(self._buffer.index(start) + len(start))
            self._reader = JsonCallReader(self._tools.syntax)
            self._started = False
            self._step = self._in_call
            return True
        until = len(self._buffer) if final else _safe(self._buffer, start, 0)
        if until:
            self._skip = ""
            self._content(self._drop(until))
        return False

    def _in_call(self, final: bool) -> bool:
        reader = self._reader
        assert reader is not None
        self._raw += self._drop(reader.feed(self._buffer))
        if reader.name is not None and not self._started:
            self._started = True
            self._emit(ToolCallStart(self._calls, self._new_id(), reader.name))
            self._calls += 1
        if self._started:
            self._raw = ""
            self._arguments(reader.take())
        if reader.state is State.DONE:
            self._step = self._at_call_end
            return True
        if reader.state is State.FAILED or final:
            if reader.state is State.FAILED:
                self._content(reader.unread if self._started else self._raw)
            elif self._started:
                self._arguments(reader.cut_off())
            else:
                self._content(self._raw)
            self._skip = ""
            self._step = self._in_content
            return True
        return False

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(ToolCallArguments(self._calls - 1, text))

    def _at_call_end(self, final: bool) -> bool:
        """Look for the marker that ends a call. Some models leave it out."""
        assert self._tools is not None
        end = self._tools.end
        text = self._buffer.lstrip(WHITESPACE)
        if text.startswith(end):
            self._drop(len(self._buffer) - len(text) + len(end))
        elif end.startswith(text):
            if not final:
                return False
            self._drop(len(self._buffer))  # a marker that was cut off
        self._skip = WHITESPACE
        self._step = self._in_content
        return True

    def _skipped(self) -> int:
        """Count the characters at the front of the buffer that are to be skipped."""
        return len(self._buffer) - len(self._buffer.lstrip(self._skip)) if self._skip else 0


def _without_newlines(text: str, start: int, stop: int) -> int:
    """Give the end of ``text[start:stop]`` without the newlines at its end."""
    while stop > start and text[stop - 1] == "\n":
        stop -= 1
    return stop


def _safe(text: str, marker: str, start: int) -> int:
    """Find how much of a text can't be a part of a marker, or of the newlines before it."""
    for length in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if text.endswith(marker[:length]):
            return _without_newlines(text, start, len(text) - length)
    return _without_newlines(text, start, len(text))
