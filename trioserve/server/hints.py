"""From where a text is likely to change, in characters, to where, in cells of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trioserve.engine.backend import Vocab
from trioserve.server.workers import Stop
from trioserve.types import Prompt, TokenId
from trioserve.types.task import shared_length

#: A header of a message has so many tokens at most: ``<|im_start|>user\n`` has three.
_HEADER = 6


def hints_of(
    vocab: Vocab,
    pieces: Sequence[str],
    prompt: Prompt,
    partings: Iterable[int],
    stop: Stop,
    *,
    add_special: bool,
) -> tuple[int, ...]:
    """Find out how many cells of a prompt come before some of the characters of its text.

    Where one of them stands after the header of a message, the header does not count: its last
    token may become one with what follows. Behind the last media, another question may be asked.

    Args:
        vocab: turns text into tokens.
        pieces: the text: each second piece stands for media.
        prompt: what was made of it.
        partings: the characters, counted through all pieces.
        stop: says whether nobody waits for this any more.
        add_special: whether the prompt begins with a special token that the text does not have.

    Raises:
        AbandonedError: `stop` said so.
    """
    if len(pieces) == 1:
        return _hints_of(vocab, pieces[0], prompt.tokens, partings, stop, add_special=add_special)
    hints = {n_before + last.n_cells for n_before, last in prompt.spans[-1:]}
    n_chars = n_tokens = 0
    for place, piece in enumerate(pieces):
        begin, n_chars = n_chars, n_chars + len(piece)
        inside = [parting - begin for parting in partings if begin < parting <= n_chars]
        if place % 2 or not piece:
            continue
        special = add_special and place == 0
        tokens = vocab.tokenize(piece, add_special=special, stop=lambda _: stop())
        start = _find(tokens, prompt.tokens, n_tokens)
        if start is None:
            continue  # a projector has changed the text; a checkpoint less does no harm
        n_tokens = start + len(tokens)
        found = _hints_of(vocab, piece, tokens, inside, stop, add_special=special)
        n_media = sum(chunk.n_cells for n_before, chunk in prompt.media if n_before <= start)
        hints.update(n_media + start + hint for hint in found)
    return tuple(sorted(hints))


def _find(tokens: Sequence[TokenId], within: Sequence[TokenId], start: int) -> int | None:
    """Find tokens in others: around media, projectors write tokens of their own."""
    first, n_tokens = tokens[:1], len(tokens)
    for place in range(start, len(within) - n_tokens + 1):
        if first == within[place : place + 1] and tokens == within[place : place + n_tokens]:
            return place
    return None


def _hints_of(
    vocab: Vocab,
    text: str,
    tokens: Sequence[TokenId],
    partings: Iterable[int],
    stop: Stop,
    *,
    add_special: bool,
) -> tuple[int, ...]:
    """Find out how many tokens of a text come before some of its characters."""
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
