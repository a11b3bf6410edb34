"""Reads output that is a row of messages, each of a header and a body."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping

from trioserve.chat.formats.syntax import Channels, Name, beginning_of, first_of, held_back
from trioserve.chat.grammar.kinds import Shape
from trioserve.chat.json_scanner import WHITESPACE, State
from trioserve.chat.parse.message import MessageParser
from trioserve.chat.parse.reader import CallReader

#: The text of a longer header is content.
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
        is_formatted: bool,
        shapes: Mapping[str, Shape],
    ) -> None:
        super().__init__(reasoning_format, new_id)
        self._channels = channels
        self._shapes = shapes
        self._is_formatted = is_formatted
        self._parse_tools = parse_tools
        self._stops = (*channels.ends, channels.start)
        self._may_stop = beginning_of(self._stops)
        #: The common beginning of all headers, possibly empty.
        headers = (channels.call_header.partition("{}")[0], channels.content_header)
        self._opening = os.path.commonprefix(headers).lstrip()  # noqa: RUF071 - letters, not folders
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
            reasons = self._reasons(text[:place], is_call=False)
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
            self._reader = CallReader(channels.body, self._shapes)
            self._raw = raw
            self._started = not any(isinstance(step, Name) for step in channels.body)
            if self._started:
                self._start_call(call.group(1))
            self._step = self._in_call
        elif self._reasons(header, is_call=call is not None):
            self._raw_reasoning(raw)
            self._write = self._reason
            self._step = self._in_body
        else:
            if call is not None or not re.search(channels.content, header):
                self._content(raw)
            self._plain()

    def _reasons(self, header: str, *, is_call: bool) -> bool:
        """Tell reasoning from content; in an answer in a format, text before it is reasoning."""
        channels = self._channels
        if self._is_formatted and not is_call and channels.content_header not in header:
            return True
        return bool(channels.reasoning and re.search(channels.reasoning, header))

    def _reason(self, text: str) -> None:
        self._reasoning(text, text)

    def _plain(self) -> None:
        self._write = self._content
        self._step = self._in_body

    def _in_body(self, final: bool) -> bool:
        self._drop(self._skipped())
        if self._buffer:
            self._skip = ""
        if self._may_stop(self._buffer) is None:
            self._write(self._drop(len(self._buffer)))
            return False
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
        """Look for a header without its start marker: a prompt often ends with that."""
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
        if not self._started and reader.name is not None:
            self._started = True
            self._start_call(reader.name)
        if self._started:
            self._arguments(reader.take())
        if reader.state is State.OPEN and not final:
            return False
        if not self._started:
            self._content(self._raw + reader.unread)
        elif reader.state is State.FAILED:
            self._content(reader.unread)
        else:
            self._skip = WHITESPACE
        self._raw = ""
        self._plain()
        return bool(self._buffer)
