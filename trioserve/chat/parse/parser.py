"""Takes generated text apart, piece by piece, into content, reasoning and tool calls.

The result does not depend on how the text is split: text is held back only while it could still
become a marker, or whitespace that goes with one. Nothing is thrown away but markers, the
whitespace around them, and the skeleton around a call's name and arguments: what begins like
a tool call and turns out not to be one comes out as content.
"""

from __future__ import annotations

import os.path
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

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
    first_of,
    held_back,
)
from trioserve.chat.grammar.schemas import texts_of
from trioserve.chat.json_scanner import WHITESPACE, State
from trioserve.chat.parse.reader import CallReader, Texts
from trioserve.errors import InvalidRequestError
from trioserve.types import Thinking, TokenId

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
        """Take more text; returns the part that is now certain."""
        self._buffer += text
        while self._buffer and self._step(False):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """End the text; returns the part that was held back."""
        while self._step(True):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _drop(self, count: int) -> str:
        """Take characters off the buffer."""
        dropped, self._buffer = self._buffer[:count], self._buffer[count:]
        return dropped

    def _skipped(self) -> int:
        """Count the characters to skip at the front of the buffer."""
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


class MarkerParser(MessageParser):
    """Reads reasoning, content and calls from one output."""

    def __init__(
        self,
        format: ChatFormat,
        reasoning_format: str,
        new_id: Callable[[], str],
        *,
        parse_tools: bool,
        prompt_tail: str,
        texts: Texts,
    ) -> None:
        super().__init__(reasoning_format, new_id)
        self._texts = texts
        self._tools: ToolCalls | None = format.tool_calls if parse_tools else None
        starts = self._tools.starts if self._tools is not None else ()
        self._markers = (*starts, *format.dropped)
        self._dropped = format.dropped
        self._fresh = True  # whether neither content nor a call has begun
        self._raw = ""  # the text of a call before its name was known
        self._started = False  # whether the call's name is out
        self._closed = 0  # how many of the texts that close a group of calls have come
        self._step = self._in_content
        if format.reasoning is not None:
            self._begin(format.reasoning, prompt_tail.rstrip(WHITESPACE))

    def _begin(self, reasoning: Reasoning, prompt: str) -> None:
        self._thinking = reasoning
        self._step = self._at_start
        if prompt.endswith(reasoning.start):
            self._skip = "\n"
            self._step = self._in_reasoning
            if self._has_field:
                self._raw_reasoning(reasoning.start)
        elif prompt.endswith(reasoning.end) and not self._shows_reasoning:
            self._skip = "\n"

    # -- states

    def _at_start(self, final: bool) -> bool:
        """Look for the marker of reasoning, before anything else."""
        start = self._thinking.start
        text = self._buffer.lstrip(WHITESPACE)
        if text.startswith(start):
            self._raw_reasoning(self._drop(len(self._buffer) - len(text) + len(start)))
            self._skip = "\n"
            self._step = self._in_reasoning
            return True
        if not final and start.startswith(text):
            return False
        self._step = self._in_content
        return True

    def _in_reasoning(self, final: bool) -> bool:
        end = self._thinking.end
        body_at = self._skipped()
        if body_at == len(self._buffer) and not final:
            self._reason(body_at, body_at, body_at)
            return False
        found = self._buffer.find(end, body_at)
        if found >= 0:
            self._reason(body_at, _without_newlines(self._buffer, body_at, found), found)
            self._raw_reasoning(self._drop(len(end)))
            self._skip = "" if self._shows_reasoning else "\n"
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
        self._reasoning(text[start:stop], text)

    def _in_content(self, final: bool) -> bool:
        if self._skip:
            self._drop(self._skipped())
            if not self._buffer:
                return False
        if self._fresh and self._tools is not None and self._tools.bare:
            return self._at_bare(self._tools, final)
        if not self._markers:
            text, self._buffer, self._skip = self._buffer, "", ""
            self._content(text)
            return False
        found, marker = first_of(self._buffer, self._markers)
        if found < 0:
            until = len(self._buffer) if final else _safe(self._buffer, self._markers, 0)
            if until:
                self._skip = ""
                self._content(self._drop(until))
            return False
        if marker in self._dropped:
            self._content(self._drop(found))
            self._drop(len(marker))
            return True
        assert self._tools is not None
        self._content(self._drop(_without_newlines(self._buffer, 0, found)))
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
                self._start_call(reader.name)
            self._raw = ""
            self._arguments(reader.take())
        elif reader.is_content:
            self._raw = ""
            self._content(reader.take())
        if reader.state is State.DONE:
            self._step = self._at_call_end
            return True
        if reader.state is State.OPEN and not final:
            return False
        if reader.is_content:
            self._content(reader.unread)
        elif not self._started:
            # Take at least one character, or else the same marker would be found again.
            self._content(self._raw or self._drop(1))
        elif reader.state is State.FAILED:
            self._content(reader.unread)
        self._skip = ""
        self._step = self._in_content
        return True

    def _at_call_end(self, final: bool) -> bool:
        """Look for another call, or the end of a group of calls, which some models leave out."""
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


class ChannelParser(MessageParser):
    """Reads the messages of one output."""

    def __init__(
        self,
        channels: Channels,
        reasoning_format: str,
        new_id: Callable[[], str],
        *,
        parse_tools: bool,
        prompt_tail: str,
    ) -> None:
        super().__init__(reasoning_format, new_id)
        self._channels = channels
        self._parse_tools = parse_tools
        self._stops = (*channels.ends, channels.start)
        #: The common beginning of all headers, possibly empty.
        headers = (channels.call_header.partition("{}")[0], channels.content_header)
        self._opening = os.path.commonprefix(headers)  # noqa: RUF071 - letters, not folders
        self._raw = ""  # the text of a header
        self._header = ""
        self._write: Callable[[str], None] = self._content
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
            self._write = self._reason if reasons else self._content
            self._step = self._in_body

    # -- states

    def _in_header(self, final: bool) -> bool:
        message = self._channels.message
        marks = (message, *self._stops)
        place, mark = first_of(self._buffer, marks)
        end = place if place >= 0 else len(self._buffer) - held_back(self._buffer, marks)
        if end > _MAX_HEADER or (place < 0 and final) or (place >= 0 and mark != message):
            self._content(self._raw)  # it is no header
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
            self._start_call(call.group(1))
            self._reader = CallReader((JsonArguments(),), {})
            self._step = self._in_call
        elif channels.reasoning and re.search(channels.reasoning, header):
            self._raw_reasoning(raw)
            self._write = self._reason
            self._step = self._in_body
        else:
            if call is not None or not re.search(channels.content, header):
                self._content(raw)
            self._plain()

    def _reason(self, text: str) -> None:
        self._reasoning(text, text)

    def _plain(self) -> None:
        self._write = self._content
        self._step = self._in_body

    def _in_body(self, final: bool) -> bool:
        self._drop(self._skipped())
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
                self._raw_reasoning(marker)
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
        self._arguments(reader.take())
        if reader.state is State.OPEN and not final:
            return False
        if reader.state is State.FAILED:
            self._content(reader.unread)
        else:
            self._skip = WHITESPACE
        self._plain()
        return bool(self._buffer)


def message_parser(
    format: ChatFormat,
    *,
    parse_tools: bool,
    reasoning_format: str = "auto",
    prompt_tail: str = "",
    new_id: Callable[[], str] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> MessageParser:
    """Make the parser of one message.

    Args:
        format: how the model writes.
        parse_tools: whether to look for tool calls; without, they are content.
        reasoning_format: "none", "auto", "deepseek" or "deepseek-legacy", as in llama-server.
        prompt_tail: the end of the prompt, which may have begun the reasoning.
        new_id: makes the ids of tool calls; by default as the format wants them.
        tools: the tools, in OpenAI's form. Where a format does not write the types of arguments,
            their schemas tell them.

    Raises:
        InvalidRequestError: there is no such reasoning format.
    """
    if reasoning_format not in REASONING_FORMATS:
        raise InvalidRequestError.at(
            "reasoning_format", f"must be one of {', '.join(REASONING_FORMATS)}."
        )
    if new_id is None:
        short = format.tool_calls is not None and format.tool_calls.short_ids
        new_id = new_short_id if short else new_call_id
    if format.channels is not None:
        return ChannelParser(
            format.channels,
            reasoning_format,
            new_id,
            parse_tools=parse_tools,
            prompt_tail=prompt_tail,
        )
    return MarkerParser(
        format,
        reasoning_format,
        new_id,
        parse_tools=parse_tools,
        prompt_tail=prompt_tail,
        texts=texts_of(tools) if tools else {},
    )


def thinking_of(format: ChatFormat, prompt_tail: str, *, may_begin: bool) -> Thinking | None:
    """Return the reasoning that an answer begins with, if it can begin with any.

    Args:
        format: how the model writes.
        prompt_tail: the end of the prompt, which may have begun the reasoning, or ended it.
        may_begin: whether the model may begin it if the prompt does not.
    """
    if (markers := format.thinking) is None:
        return None
    tail = prompt_tail.rstrip(WHITESPACE)
    if tail.endswith(markers.start):
        return Thinking(start=markers.start, end=markers.end, begun=True)
    if tail.endswith(markers.end) or not may_begin:
        return None
    return Thinking(start=markers.start, end=markers.end)


def preserved_tokens(
    format: ChatFormat, control: Sequence[TokenId], names: Sequence[bytes]
) -> frozenset[TokenId]:
    """Find the control tokens whose names are a part of the markers of a format.

    The parser of its messages reads text, and would not see them else.
    """
    texts = "\0".join(format.texts).encode()
    return frozenset(token for token in control if names[token] in texts)
