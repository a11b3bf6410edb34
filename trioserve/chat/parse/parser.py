"""Takes generated text apart, piece by piece, into content, reasoning and tool calls.

The result does not depend on how the text is split: text is held back only while it could still
become a marker, or whitespace that goes with one. Nothing is thrown away but markers, the
whitespace around them, and the skeleton around a call's name and arguments: what begins like
a tool call and turns out not to be one comes out as content.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trioserve.chat.deltas import Delta
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.formats.values import texts_of
from trioserve.chat.parse.channels import ChannelParser
from trioserve.chat.parse.markers import MarkerParser
from trioserve.chat.parse.output import Output
from trioserve.errors import InvalidRequestError

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
