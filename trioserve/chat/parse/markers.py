"""Parses messages whose parts stand between markers: reasoning, then content and tool calls."""

from __future__ import annotations

from trioserve.chat.formats.syntax import ChatFormat, Reasoning, Step, ToolCalls
from trioserve.chat.json_scanner import WHITESPACE, State
from trioserve.chat.parse.cursor import first_of, held_back
from trioserve.chat.parse.output import Output
from trioserve.chat.parse.reader import CallReader, Texts
from trioserve.chat.parse.states import StateParser


class MarkerParser(StateParser):
    """Reads reasoning, content and calls from one output."""

    def __init__(
        self, format: ChatFormat, out: Output, *, parse_tools: bool, prompt_tail: str, texts: Texts
    ) -> None:
        super().__init__()
        self._out = out
        self._texts = texts
        self._tools: ToolCalls | None = format.tool_calls if parse_tools else None
        starts = self._tools.starts if self._tools is not None else ()
        self._markers = (*starts, *format.dropped)
        self._dropped = format.dropped
        self._skip = ""  # characters that are dropped until another one comes
        self._fresh = True  # whether neither content nor a call has begun
        self._raw = ""  # what has been read of a call before its name was known
        self._reader = CallReader((), texts)
        self._started = False  # whether the call's name is out
        self._closed = 0  # how many of the texts that close a group of calls have come
        self._step = self._in_content
        if format.reasoning is not None:
            self._begin(format.reasoning, prompt_tail.rstrip(WHITESPACE))

    def _begin(self, reasoning: Reasoning, prompt: str) -> None:
        self._reasoning = reasoning
        self._step = self._at_start
        if prompt.endswith(reasoning.start):
            self._skip = "\n"
            self._step = self._in_reasoning
            if self._out.to_reasoning:
                self._out.raw_reasoning(reasoning.start)
        elif prompt.endswith(reasoning.end) and not self._out.to_content:
            self._skip = "\n"

    # -- states

    def _at_start(self, final: bool) -> bool:
        """Look for the marker of reasoning, before anything else."""
        start = self._reasoning.start
        text = self._buffer.lstrip(WHITESPACE)
        if text.startswith(start):
            self._out.raw_reasoning(self._drop(len(self._buffer) - len(text) + len(start)))
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
            self._out.raw_reasoning(self._drop(len(end)))
            self._skip = "" if self._out.to_content else "\n"
            self._step = self._in_content
            return True
        until = len(self._buffer) if final else _safe(self._buffer, (end,), body_at)
        self._reason(body_at, until, until)
        if until > body_at:
            self._skip = ""
        return False

    def _reason(self, start: int, stop: int, until: int) -> None:
        """Take the buffer up to `until`; the reasoning in it is from `start` to `stop`."""
        text = self._drop(until)
        self._out.reasoning(text[start:stop])
        self._out.raw_reasoning(text)

    def _in_content(self, final: bool) -> bool:
        self._drop(self._skipped())
        if not self._buffer:
            return False
        if self._fresh and self._tools is not None and self._tools.bare:
            return self._at_bare(self._tools, final)
        if not self._markers:
            self._skip = ""
            self._out.content(self._drop(len(self._buffer)))
            return False
        found, marker = first_of(self._buffer, self._markers)
        if found < 0:
            until = len(self._buffer) if final else _safe(self._buffer, self._markers, 0)
            if until:
                self._skip = ""
                self._out.content(self._drop(until))
            return False
        if marker in self._dropped:
            self._out.content(self._drop(found))
            self._drop(len(marker))
            return True
        assert self._tools is not None
        self._out.content(self._drop(_without_newlines(self._buffer, 0, found)))
        newlines = len(self._buffer) - len(self._buffer.lstrip("\n"))
        own = marker in self._tools.again  # a part of the call
        self._read(newlines + (0 if own else len(marker)), self._tools.opening if not own else ())
        return True

    def _at_bare(self, tools: ToolCalls, final: bool) -> bool:
        """Look whether the message begins with a call that has no marker."""
        text = self._buffer.lstrip(WHITESPACE)
        if not final and text != tools.bare and tools.bare.startswith(text):
            return False
        self._fresh = False
        if text.startswith(tools.bare):
            self._read(len(self._buffer) - len(text), tools.opening)
        return True

    def _read(self, count: int, opening: tuple[Step, ...]) -> None:
        """Begin to read a call; the next characters of the buffer go with it."""
        assert self._tools is not None
        self._fresh = False
        self._raw = self._drop(count)
        self._reader = CallReader((*opening, *self._tools.call), self._texts)
        self._started = False
        self._closed = 0
        self._step = self._in_call

    def _in_call(self, final: bool) -> bool:
        reader = self._reader
        self._raw += self._drop(reader.feed(self._buffer, final=final))
        if reader.name is not None:
            if not self._started:
                self._started = True
                self._out.start_call(reader.name)
            self._raw = ""
            self._out.arguments(reader.take())
        elif reader.is_content:
            self._raw = ""
            self._out.content(reader.take())
        if reader.state is State.DONE:
            self._step = self._at_call_end
            return True
        if reader.state is State.OPEN and not final:
            return False
        if reader.is_content:
            self._out.content(reader.unread)
        elif not self._started:
            # At least one character goes, or else the same marker would be found again.
            self._out.content(self._raw or self._drop(1))
        elif reader.state is State.FAILED:
            self._out.content(reader.unread)
        self._skip = ""
        self._step = self._in_content
        return True

    def _at_call_end(self, final: bool) -> bool:
        """Look for another call, or what closes a group of calls. Some models leave that out."""
        tools = self._tools
        assert tools is not None
        text = self._buffer.lstrip(WHITESPACE)
        gap = len(self._buffer) - len(text)
        closing = tools.closing[self._closed :]
        more = (*tools.between, *tools.again) if self._closed == 0 else ()
        texts = (*more, *closing)
        if any(len(one) > len(text) and one.startswith(text) for one in texts):
            if not final:
                return False
            self._drop(len(self._buffer))  # a marker that was cut off
        fits = max((one for one in texts if text.startswith(one)), key=len, default="")
        if fits in more:
            self._read(gap + (len(fits) if fits in tools.between else 0), ())
        elif fits:
            self._drop(gap + len(fits))
            self._closed += closing.index(fits) + 1
        else:
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


def _safe(text: str, markers: tuple[str, ...], start: int) -> int:
    """Find how much of a text can't be a part of a marker, or of the newlines before it."""
    return _without_newlines(text, start, len(text) - held_back(text[start:], markers))
