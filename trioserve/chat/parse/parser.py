"""Takes generated text apart, piece by piece, into content, reasoning and tool calls.

The result does not depend on how the text is split: text is held back only while it could still
become a marker, or whitespace that goes with one. Nothing is thrown away but markers, the
whitespace around them, and the skeleton around a call's name and arguments: what begins like
a tool call and turns out not to be one comes out as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta
from trioserve.chat.formats.syntax import (
    ChatFormat,
    Reasoning,
    Step,
    ToolCalls,
    beginning_of,
    first_of,
    held_back,
)
from trioserve.chat.grammar.kinds import Shape, shapes_of
from trioserve.chat.json_scanner import WHITESPACE, State
from trioserve.chat.params import name_of
from trioserve.chat.parse.channels import ChannelParser
from trioserve.chat.parse.message import (
    REASONING_FORMATS,
    MessageParser,
    new_call_id,
    new_short_id,
)
from trioserve.chat.parse.reader import CallReader
from trioserve.errors import InvalidRequestError
from trioserve.thinking import ThinkingPlaces
from trioserve.types import Aside, Thinking, TokenId


class MarkerParser(MessageParser):
    """Reads reasoning, content and calls from one output, in any order."""

    def __init__(
        self,
        format: ChatFormat,
        reasoning_format: str,
        new_id: Callable[[], str],
        *,
        parse_tools: bool,
        prompt_tail: str,
        shapes: Mapping[str, Shape],
        names: frozenset[str],
        is_formatted: bool,
    ) -> None:
        super().__init__(reasoning_format, new_id)
        self._shapes, self._names = shapes, names
        self._tools: ToolCalls | None = format.tool_calls if parse_tools else None
        starts = self._tools.starts if self._tools is not None else ()
        self._dropped = () if is_formatted else format.dropped
        self._markers = (*starts, *self._dropped)
        self._fresh = True  # whether neither content nor a call has begun
        self._raw = ""  # the text of a call before its name was known
        self._started = False  # whether the call's name is out
        self._closed = 0  # how many of the texts that close a group of calls have come
        self._step = self._in_content
        #: Finds what may be a marker, while nothing is held back; None: there is more to look at.
        self._quick: Callable[..., object] | None = None
        self._inside = False  # whether what is around a call is reasoning
        self._start = ""  # of more reasoning; a word is no marker within a text
        reasoning = format.reasoning
        if reasoning is not None and not is_formatted and not reasoning.start[0].isalpha():
            self._start = reasoning.start
            self._markers += (self._start,)
        self._places = ThinkingPlaces(self._start)
        self._may_mark = beginning_of(self._markers)
        if reasoning is not None:
            self._in_thought = (reasoning.end, *starts)
            self._may_end_thought = beginning_of(self._in_thought)
            self._begin(reasoning, prompt_tail.rstrip(WHITESPACE))

    def feed(self, text: str) -> list[Delta]:
        """Take more text. As long as nothing in it can be a marker, it is one delta."""
        if self._quick is not None and text and self._quick(text) is None:
            if self._inside:
                return [ReasoningDelta(text)]
            self._places.add(text)
            return [ContentDelta(text)]
        self._quick = None
        return super().feed(text)

    def _begin(self, reasoning: Reasoning, prompt: str) -> None:
        self._thinking = reasoning
        self._step = self._at_start
        if prompt.endswith(reasoning.start):
            self._think()
            if self._has_field:
                self._raw_reasoning(reasoning.start)
        elif prompt.endswith(reasoning.end) and not self._shows_reasoning:
            self._skip = "\n"

    def _think(self) -> None:
        self._skip = "\n"
        self._inside = True
        self._step = self._in_reasoning

    def _say(self, text: str) -> None:
        """Add text around a call: content or reasoning."""
        if self._inside:
            self._reasoning(text, text)
        else:
            self._places.add(text)
            self._content(text)

    def _resume(self, skip: str) -> None:
        """Continue with what is around a call, after skipping some characters."""
        self._skip = skip
        self._step = self._in_reasoning if self._inside else self._in_content

    # -- states

    def _at_start(self, final: bool) -> bool:
        """Look for the marker of reasoning, before anything else."""
        start = self._thinking.start
        text = self._buffer.lstrip(WHITESPACE)
        if text.startswith(start):
            self._raw_reasoning(self._drop(len(self._buffer) - len(text) + len(start)))
            self._think()
            return True
        if not final and start.startswith(text):
            return False
        self._step = self._in_content
        return True

    def _in_reasoning(self, final: bool) -> bool:
        body_at = self._skipped()
        if body_at == len(self._buffer) and not final:
            self._reason(body_at, body_at, body_at)
            return False
        if self._may_end_thought(self._buffer, body_at) is None:
            until = len(self._buffer)
            self._reason(body_at, until, until)
            self._skip = ""
            if self._has_field and not self._shows_reasoning:
                self._quick = self._may_end_thought
            return False
        found, marker = first_of(self._buffer, self._in_thought, body_at)
        if found < 0:
            until = len(self._buffer) if final else _safe(self._buffer, self._in_thought, body_at)
            self._reason(body_at, until, until)
            if until > body_at:
                self._skip = ""
            return False
        body_end = _without_newlines(self._buffer, body_at, found)
        if marker != self._thinking.end:
            self._reason(body_at, body_end, body_end)
            self._begin_call(marker)
            return True
        self._reason(body_at, body_end, found)
        self._raw_reasoning(self._drop(len(marker)))
        self._inside = False
        self._resume("" if self._shows_reasoning else "\n")
        self._places.end_thinking()
        return True

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
        if self._may_mark(self._buffer) is None:
            text, self._buffer, self._skip = self._buffer, "", ""
            self._say(text)
            self._quick = self._may_mark
            return False
        found, marker = first_of(self._buffer, self._markers)
        if found < 0:
            until = len(self._buffer) if final else _safe(self._buffer, self._markers, 0)
            if until:
                self._skip = ""
                self._say(self._drop(until))
            return False
        if marker == self._start:
            self._say(self._drop(found))
            return self._at_thinking(final)
        if marker in self._dropped:
            self._say(self._drop(_without_newlines(self._buffer, 0, found)))
            self._drop(len(self._buffer) - len(self._buffer.lstrip("\n")) + len(marker))
            self._skip = "\n"
            self._places.add("\n")
            return True
        self._say(self._drop(_without_newlines(self._buffer, 0, found)))
        self._begin_call(marker)
        return True

    def _at_thinking(self, final: bool) -> bool:
        """Decide on the marker of reasoning that the buffer begins with."""
        thinks = self._places.allow(self._buffer[len(self._start) :], final=final)
        if thinks is None:
            return False
        marker = self._drop(len(self._start))
        self._skip = ""
        if thinks:
            self._raw_reasoning(marker)
            self._think()
        else:
            self._say(marker)
        return True

    def _at_bare(self, tools: ToolCalls, final: bool) -> bool:
        """Look for a call without a marker at the beginning of the message."""
        text = self._buffer.lstrip(WHITESPACE)
        if not text and not final:
            return False
        self._fresh = False
        if text and text[0] in tools.bare:
            self._read(len(self._buffer) - len(text), tools.opening)
        return True

    def _begin_call(self, marker: str) -> None:
        """Begin to read a call at its marker, before which only newlines may stand."""
        assert self._tools is not None
        newlines = len(self._buffer) - len(self._buffer.lstrip("\n"))
        own = marker in self._tools.again  # a part of the call
        self._read(newlines + (0 if own else len(marker)), self._tools.opening if not own else ())

    def _read(self, count: int, opening: tuple[Step, ...]) -> None:
        """Begin to read a call; the next characters of the buffer go with it."""
        assert self._tools is not None
        self._fresh = False
        self._raw, self._n_begun = self._drop(count), count
        self._reader = CallReader((*opening, *self._tools.call), self._shapes)
        self._started = False
        self._closed = 0
        self._step = self._in_call

    def _in_call(self, final: bool) -> bool:
        reader = self._reader
        count = reader.feed(self._buffer, final=final)
        if self._started and reader.state is State.OPEN and not final:
            self._buffer = self._buffer[count:]
            self._arguments(reader.take())
            return False
        self._raw += self._drop(count)
        if reader.name is not None:
            if not self._started:
                if self._names and self._step_back(reader.name):
                    return True
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
            self._say(self._raw or self._drop(1))
        elif reader.state is State.FAILED:
            self._say(reader.unread)
        self._resume("")
        return True

    def _step_back(self, name: str) -> bool:
        """Take a call of no known tool for reasoning, if it stands there."""
        if not self._inside or name in self._names:
            return False
        self._buffer = self._raw + self._buffer
        self._say(self._drop(max(1, self._n_begun)))
        self._resume("")
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
            self._places.add("\n")
            self._resume(WHITESPACE)
        return True


def _without_newlines(text: str, start: int, stop: int) -> int:
    """Give the end of ``text[start:stop]`` without the newlines at its end."""
    while stop > start and text[stop - 1] == "\n":
        stop -= 1
    return stop


def _safe(text: str, markers: tuple[str, ...], start: int) -> int:
    """Find how much of a text can't be a part of a marker, or of the newlines before it."""
    return _without_newlines(text, start, len(text) - held_back(text[start:], markers))


def message_parser(
    format: ChatFormat,
    *,
    parse_tools: bool,
    reasoning_format: str = "auto",
    prompt_tail: str = "",
    new_id: Callable[[], str] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    is_formatted: bool = False,
) -> MessageParser:
    """Make the parser of one message.

    Args:
        format: of the model.
        parse_tools: look for tool calls; otherwise they are content.
        reasoning_format: "none", "auto", "deepseek" or "deepseek-legacy", as in llama-server.
        prompt_tail: the end of the prompt, which may have begun the reasoning.
        new_id: makes the ids of tool calls; by default as the format wants them.
        tools: in OpenAI's form. Their schemas have the types of arguments, which some formats do
            not write. In reasoning, calls of other tools are text.
        is_formatted: a grammar determines all of the answer, which then has no markers but those
            of calls; what comes before it is reasoning.

    Raises:
        InvalidRequestError: the reasoning format is unknown.
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
            is_formatted=is_formatted,
            shapes=shapes_of(tools),
        )
    return MarkerParser(
        format,
        reasoning_format,
        new_id,
        parse_tools=parse_tools,
        prompt_tail=prompt_tail,
        shapes=shapes_of(tools),
        names=frozenset(map(name_of, tools)),
        is_formatted=is_formatted,
    )


def thinking_of(format: ChatFormat, prompt_tail: str, *, may_begin: bool) -> Thinking | None:
    """Return the reasoning that an answer begins with, if it can begin with any.

    Args:
        format: of the model.
        prompt_tail: the end of the prompt, which may have begun the reasoning, or ended it.
        may_begin: the model may begin it if the prompt does not.
    """
    if (markers := format.thinking) is None:
        return None
    tail = prompt_tail.rstrip(WHITESPACE)
    if tail.endswith(markers.start):
        return Thinking(start=markers.start, end=markers.end, begun=True)
    if tail.endswith(markers.end) or not may_begin:
        return None
    return Thinking(start=markers.start, end=markers.end)


def aside_of(format: ChatFormat, prompt_tail: str) -> Aside | None:
    """Return what stands beside the answers of a format, if it has reasoning.

    `prompt_tail` is the end of the prompt, which may have begun reasoning, or a message.
    """
    if (channels := format.channels) is not None:
        if not channels.reasoning:
            return None
        *_, last = prompt_tail.rpartition(channels.start)
        header, is_message, _ = last.partition(channels.message)
        answers = is_message and not re.search(channels.reasoning, header)
        begun = None if answers or channels.start not in prompt_tail else header
        return Aside(channels.start, channels.answer, begun)
    if (markers := format.reasoning) is None:
        return None
    begun = "" if prompt_tail.rstrip(WHITESPACE).endswith(markers.start) else None
    return Aside(markers.start, ((markers.end,),), begun)


def preserved_tokens(
    format: ChatFormat, control: Sequence[TokenId], names: Sequence[bytes]
) -> frozenset[TokenId]:
    """Find the control tokens whose names are a part of the markers of a format.

    The parser of its messages reads text, and would not see them else.
    """
    texts = "\0".join(format.texts).encode()
    return frozenset(token for token in control if names[token] in texts)
