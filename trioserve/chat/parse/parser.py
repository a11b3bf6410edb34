"""Takes generated text apart, piece by piece, into content, reasoning and tool calls.

The result does not depend on how the text is split: text is held back only while it could still
become a marker, or whitespace that goes with one. Nothing is thrown away but markers, the
whitespace around them, and the skeleton around a call's name and arguments: what begins like
a tool call and turns out not to be one comes out as content.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.formats.syntax import (
    Channels,
    ChatFormat,
    JsonArguments,
    Reasoning,
    Step,
    ToolCalls,
)
from trioserve.chat.formats.values import texts_of
from trioserve.chat.json_scanner import WHITESPACE, State
from trioserve.chat.parse.cursor import first_of, held_back
from trioserve.chat.parse.reader import CallReader, Texts
from trioserve.errors import InvalidRequestError


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


class StateParser:
    """Has a buffer, and a state that takes from it.

    A state is a method: it is told whether no more text comes, takes what is certain from the
    buffer, may put another state in its place, and returns whether to go on.
    """

    _step: Callable[[bool], bool]

    def __init__(self) -> None:
        self._buffer = ""

    def feed(self, text: str) -> None:
        """Take more text."""
        self._buffer += text
        while self._buffer and self._step(False):
            pass

    def finish(self) -> None:
        """Say that no more text comes."""
        while self._step(True):
            pass

    def _drop(self, count: int) -> str:
        """Take characters off the buffer."""
        dropped, self._buffer = self._buffer[:count], self._buffer[count:]
        return dropped


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


#: Longer headers are none: their text is content.
_MAX_HEADER = 500


class ChannelParser(StateParser):
    """Reads the messages of one output."""

    def __init__(
        self, channels: Channels, out: Output, *, parse_tools: bool, prompt_tail: str
    ) -> None:
        super().__init__()
        self._channels = channels
        self._out = out
        self._parse_tools = parse_tools
        self._stops = (*channels.ends, channels.start)
        #: What all headers begin with; there may be nothing.
        self._opening = _common(channels.call_header.partition("{}")[0], channels.content_header)
        self._raw = ""  # what the model wrote of a header
        self._header = ""
        self._skip = ""  # characters that are dropped until another one comes
        self._write: Callable[[str], None] = out.content
        self._reader = CallReader((), {})
        self._step = self._in_header
        begun = prompt_tail.rfind(channels.start)
        if begun >= 0:
            self._continue(prompt_tail[begun + len(channels.start) :])

    def _continue(self, text: str) -> None:
        """Take over from a prompt that ends in the middle of a message."""
        place = text.find(self._channels.message)
        if place < 0:
            self._header = text.strip(WHITESPACE)
        elif first_of(text, self._stops)[0] < 0:
            # A call is not taken over: it might be the text of a user that looks like one.
            reasons = self._channels.reasoning and re.search(self._channels.reasoning, text[:place])
            self._write = self._reason if reasons else self._out.content
            self._step = self._in_body

    # -- states

    def _in_header(self, final: bool) -> bool:
        message = self._channels.message
        marks = (message, *self._stops)
        place, mark = first_of(self._buffer, marks)
        end = place if place >= 0 else len(self._buffer) - held_back(self._buffer, marks)
        if end > _MAX_HEADER or (place < 0 and final) or (place >= 0 and mark != message):
            self._out.content(self._raw)  # it is no header
            self._raw = ""
            self._plain()
            return bool(self._buffer)
        if place < 0:
            return False
        text = self._drop(place)
        self._header += text
        self._route(self._raw + text + self._drop(len(message)))
        return True

    def _route(self, raw: str) -> None:
        """Choose where the body goes. `raw` is what the model wrote up to it."""
        channels, header = self._channels, self._header
        self._header = self._raw = ""
        call = re.search(channels.call, header)
        if call is not None and self._parse_tools:
            self._out.start_call(call.group(1))
            self._reader = CallReader((JsonArguments(),), {})
            self._step = self._in_call
        elif channels.reasoning and re.search(channels.reasoning, header):
            self._out.raw_reasoning(raw)
            self._write = self._reason
            self._step = self._in_body
        else:
            if call is not None or not re.search(channels.content, header):
                self._out.content(raw)
            self._plain()

    def _reason(self, text: str) -> None:
        self._out.reasoning(text)
        self._out.raw_reasoning(text)

    def _plain(self) -> None:
        self._write = self._out.content
        self._step = self._in_body

    def _in_body(self, final: bool) -> bool:
        self._drop(len(self._buffer) - len(self._buffer.lstrip(self._skip)) if self._skip else 0)
        if self._buffer:
            self._skip = ""
        place, stop = first_of(self._buffer, self._stops)
        if place < 0:
            held = 0 if final else held_back(self._buffer, self._stops)
            self._write(self._drop(len(self._buffer) - held))
            return False
        self._write(self._drop(place))
        marker = self._drop(len(stop))
        if stop == self._channels.start:
            self._raw = marker
            self._step = self._in_header
        else:
            reasons = self._write == self._reason
            self._plain()
            if reasons:
                self._out.raw_reasoning(marker)
                if self._opening:
                    self._step = self._after_reasoning
        return True

    def _after_reasoning(self, final: bool) -> bool:
        """Look for a header without its start marker.

        A grammar allows one, because a prompt often ends with the marker.
        """
        text = self._buffer.lstrip(WHITESPACE)
        if text.startswith(self._opening):
            self._drop(len(self._buffer) - len(text))
            self._step = self._in_header
            return True
        if self._opening.startswith(text) and not final:
            return False
        self._plain()
        return bool(self._buffer)

    def _in_call(self, final: bool) -> bool:
        reader = self._reader
        self._drop(reader.feed(self._buffer, final=final))
        self._out.arguments(reader.take())
        if reader.state is State.OPEN and not final:
            return False
        if reader.state is State.FAILED:
            self._out.content(reader.unread)
        else:
            self._skip = WHITESPACE
        self._plain()
        return bool(self._buffer)


def _common(one: str, other: str) -> str:
    """Return what two texts begin with alike."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in pairs)


#: For each of llama-server's reasoning formats: whether reasoning goes to a field of its own, and
#: whether it is in the content, with its markers.
REASONING_FORMATS = {
    "none": (False, True),
    "auto": (True, False),
    "deepseek": (True, False),
    "deepseek-legacy": (True, True),
}

_SHORT_ID = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Make an id for a tool call that nobody can guess."""
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """Make an id as some templates insist on: nine letters and digits."""
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))


class MessageParser:
    """Parses one message.

    Args:
        format: how the model writes.
        parse_tools: whether to look for tool calls; without, they are content.
        reasoning_format: "none", "auto", "deepseek" or "deepseek-legacy", as in llama-server.
        prompt_tail: the end of the prompt, which tells whether it has begun the reasoning.
        new_id: makes the ids of tool calls; by default as the format wants them.
        tools: the tools, in OpenAI's form. Where a format does not write the types of arguments,
            their schemas tell them.

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
        new_id: Callable[[], str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if reasoning_format not in REASONING_FORMATS:
            raise InvalidRequestError(
                f"'reasoning_format' must be one of {', '.join(REASONING_FORMATS)}.",
                param="reasoning_format",
            )
        if new_id is None:
            short = format.tool_calls is not None and format.tool_calls.short_ids
            new_id = new_short_id if short else new_call_id
        self._out = Output(*REASONING_FORMATS[reasoning_format], new_id)
        self._parser: ChannelParser | MarkerParser
        if format.channels is not None:
            self._parser = ChannelParser(
                format.channels, self._out, parse_tools=parse_tools, prompt_tail=prompt_tail
            )
        else:
            self._parser = MarkerParser(
                format,
                self._out,
                parse_tools=parse_tools,
                prompt_tail=prompt_tail,
                texts=texts_of(tools),
            )

    def feed(self, text: str) -> list[Delta]:
        """Take more text; gives what is now certain."""
        self._parser.feed(text)
        return self._out.take()

    def finish(self) -> list[Delta]:
        """Say that no more text comes; gives what was held back."""
        self._parser.finish()
        return self._out.take()
