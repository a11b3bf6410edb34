"""Parses output of a model as a server does, with ids that a test knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from trioserve.chat.deltas import Delta, Message, MessageBuilder
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.parse.message import MessageParser
from trioserve.chat.parse.parser import message_parser


def make_parser(format: ChatFormat, **kwargs: Any) -> MessageParser:
    """A parser whose calls have the ids call_0, call_1 and so on."""
    ids = itertools.count()
    defaults = {"parse_tools": True, "new_id": lambda: f"call_{next(ids)}"}
    return message_parser(format, **defaults | kwargs)


def deltas_of(pieces: Iterable[str], format: ChatFormat, **kwargs: Any) -> list[Delta]:
    """The parsed output of text in pieces, such as a list or, for single characters, a string."""
    parser = make_parser(format, **kwargs)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def built(deltas: Iterable[Delta]) -> Message:
    """The message that deltas add up to."""
    builder = MessageBuilder()
    for delta in deltas:
        builder.add(delta)
    return builder.build()


def parse(pieces: Iterable[str], format: ChatFormat, **kwargs: Any) -> Message:
    """The message that text in pieces is parsed to."""
    return built(deltas_of(pieces, format, **kwargs))
