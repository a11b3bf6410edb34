"""What a chat says of the reasoning in its answer, for the engine and for grammars."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.json_scanner import WHITESPACE
from trioserve.types import Grammar, Thinking, TokenId


def thinking_of(format: ChatFormat, prompt_tail: str, *, may_begin: bool) -> Thinking | None:
    """Say what reasoning an answer begins with, if it can begin with any.

    Args:
        format: how the model writes.
        prompt_tail: the end of the prompt, which may have begun the reasoning, or ended it.
        may_begin: whether the model may begin it where the prompt says nothing.
    """
    if (markers := format.thinking) is None:
        return None
    tail = prompt_tail.rstrip(WHITESPACE)
    if tail.endswith(markers.start):
        return Thinking(start=markers.start, end=markers.end, begun=True)
    if tail.endswith(markers.end) or not may_begin:
        return None
    return Thinking(start=markers.start, end=markers.end)


def after_thinking(
    grammar: Grammar, format: ChatFormat, thinking: Thinking | None, reasoning_format: str
) -> Grammar:
    """Have a grammar for the answer begin after the reasoning.

    Where the model writes channels it begins in that of the answer, and a grammar for tool calls
    knows of channels itself. With the reasoning format "none" all of the output is content: then
    there is only reasoning that the prompt has begun.
    """
    if format.channels is not None and grammar.kind != "tools":
        if grammar.triggers or not format.channels.answer:
            return grammar
        return attrs.evolve(grammar, triggers=format.channels.answer, required=True)
    if thinking is None or any(thinking.end in texts for texts in grammar.triggers):
        return grammar
    if reasoning_format == "none" and not thinking.begun and not grammar.triggers:
        return grammar
    return attrs.evolve(grammar, thinking=thinking)


def preserved_tokens(
    format: ChatFormat, pieces: Sequence[bytes], names: Sequence[bytes]
) -> frozenset[TokenId]:
    """Find the control tokens whose names are a part of the markers of a format.

    The parser of its messages reads text, and would not see them else.
    """
    texts = "\0".join(format.texts).encode()
    return frozenset(
        token
        for token, (piece, name) in enumerate(zip(pieces, names, strict=True))
        if name and not piece and name in texts
    )
