"""A prompt, as the engine and its caches count and compare it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.types.media import CellKey, MediaChunk
from trioserve.types.sampling import TokenId


def _to_tuple(tokens: Iterable[TokenId]) -> tuple[TokenId, ...]:
    return tuple(tokens)


def _to_chunks(media: Iterable[tuple[int, MediaChunk]]) -> tuple[tuple[int, MediaChunk], ...]:
    return tuple(media)


def _keys(prompt: Prompt) -> tuple[CellKey, ...]:
    keys: list[CellKey] = []
    n_tokens = 0
    for n_before, chunk in prompt.media:
        keys += prompt.tokens[n_tokens:n_before]
        keys += chunk.keys
        n_tokens = n_before
    return (*keys, *prompt.tokens[n_tokens:]) if keys else prompt.tokens


def _spans(prompt: Prompt) -> tuple[tuple[int, MediaChunk], ...]:
    spans, n_media = [], 0
    for n_before, chunk in prompt.media:
        spans.append((n_before + n_media, chunk))
        n_media += chunk.n_cells
    return tuple(spans)


def _lowest(prompt: Prompt) -> TokenId:
    return min(prompt.tokens, default=0)


def _highest(prompt: Prompt) -> TokenId:
    return max(prompt.tokens, default=0)


@attrs.frozen
class Prompt:
    """What a task continues: tokens, and chunks of media between them.

    Its length is the number of cells that it takes in the KV cache. A chunk takes many cells and,
    with M-RoPE, fewer positions; so a length in cells is not a position.
    """

    #: Its text.
    tokens: tuple[TokenId, ...] = attrs.field(converter=_to_tuple)
    #: Its chunks in their order, each with the number of tokens before it.
    media: tuple[tuple[int, MediaChunk], ...] = attrs.field(
        default=(), converter=_to_chunks, eq=False, repr=False, kw_only=True
    )
    #: Lengths in cells at which a later prompt is likely to part from this one. Where memory cannot
    #: be cut, the state is kept there.
    hints: tuple[int, ...] = attrs.field(
        default=(), converter=_to_tuple, eq=False, repr=False, kw_only=True
    )
    #: Its chunks, each with the number of cells before it.
    spans: tuple[tuple[int, MediaChunk], ...] = attrs.field(
        init=False, repr=False, eq=False, default=attrs.Factory(_spans, True)
    )
    #: What each cell is compared by. Equal prompts have equal keys, and no others do.
    keys: Sequence[CellKey] = attrs.field(
        init=False, repr=False, default=attrs.Factory(_keys, True)
    )
    #: The range of the token ids, found once: a prompt may have a hundred thousand of them.
    lowest: TokenId = attrs.field(init=False, repr=False, default=attrs.Factory(_lowest, True))
    highest: TokenId = attrs.field(init=False, repr=False, default=attrs.Factory(_highest, True))

    @classmethod
    def joined(cls, prompts: Iterable[Prompt]) -> Self:
        """Put prompts one after another."""
        tokens: list[TokenId] = []
        media: list[tuple[int, MediaChunk]] = []
        for prompt in prompts:
            media += ((len(tokens) + n_before, chunk) for n_before, chunk in prompt.media)
            tokens += prompt.tokens
        return cls(tokens, media=media)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def n_positions(self) -> int:
        """How many positions of a sequence it takes."""
        return len(self.tokens) + sum(chunk.n_positions for _, chunk in self.media)

    def span_from(self, cell: int) -> tuple[int, MediaChunk] | None:
        """Find the first of the `spans` that does not end before a cell."""
        for start, chunk in self.spans:
            if start + chunk.n_cells > cell:
                return start, chunk
        return None

    def part_from(self, cell: int) -> tuple[int, MediaChunk | None]:
        """Find where the tokens that begin at a cell end, or the chunk that it is in; and which."""
        span = self.span_from(cell)
        if span is None:
            return len(self), None
        start, chunk = span
        return (start, None) if start > cell else (start + chunk.n_cells, chunk)

    def position(self, cell: int) -> int:
        """The position of a cell that is a token, or the first of a chunk."""
        ended = (chunk for start, chunk in self.spans if start + chunk.n_cells <= cell)
        return cell - sum(chunk.n_cells - chunk.n_positions for chunk in ended)

    def check(self, n_vocab: int, param: str) -> None:
        """Refuse tokens that a vocabulary of `n_vocab` does not have.

        Raises:
            InvalidRequestError: there is one; the error names `param`.
        """
        if self.lowest < 0 or self.highest >= n_vocab:
            token = self.lowest if self.lowest < 0 else self.highest
            raise InvalidRequestError(
                f"'{param}' has an unknown token, {token}: token ids run from 0 to {n_vocab - 1}.",
                param=param,
            )
