"""From where a text is likely to change, in characters, to where, in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trioserve.engine.backend import Vocab
from trioserve.server.workers import Stop
from trioserve.types import TokenId
from trioserve.types.prefix import shared_length

#: A header of a message has so many tokens at most: ``<|im_start|>user\n`` has three.
_HEADER = 6


def hints_of(
    vocab: Vocab,
    text: str,
    tokens: Sequence[TokenId],
    partings: Iterable[int],
    stop: Stop,
    *,
    add_special: bool,
) -> tuple[int, ...]:
    """Find out how many tokens of a text come before some of its characters.

    Where one of them stands after the header of a message, the header does not count: its last
    token may become one with what follows.

    Raises:
        AbandonedError: `stop` said so.
    """
    hints = set()
    for parting in partings:
        n_before = _count(vocab, text, tokens, parting, stop, add_special=add_special)
        header = tokens[max(0, n_before - _HEADER) : n_before]
        after_control = [i for i, token in enumerate(header, 1) if not vocab.pieces[token]]
        hints.add(n_before - (len(header) - after_control[-1] if after_control else 0))
    return tuple(sorted(hints))


def _count(
    vocab: Vocab,
    text: str,
    tokens: Sequence[TokenId],
    parting: int,
    stop: Stop,
    *,
    add_special: bool,
) -> int:
    """Count the tokens before a character; tokenizes the shorter part, if that says it."""
    if parting * 2 > len(text):
        tail = vocab.tokenize(text[parting:], stop=lambda _: stop())
        n_before = len(tokens) - len(tail)
        if tuple(tokens[n_before:]) == tail:
            return n_before
    head = vocab.tokenize(text[:parting], add_special=add_special, stop=lambda _: stop())
    return shared_length(list(head), list(tokens))
