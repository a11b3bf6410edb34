"""Masks: which tokens a grammar allows next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trioserve.errors import EngineError, InvalidRequestError
from trioserve.types import TokenId


class Mask:
    """Which tokens may come next.

    `allowed` are their ids where they are few; else `forbidden` are those of all others. `only`
    is set where there is no choice.
    """

    __slots__ = ("_words", "allowed", "forbidden", "only")

    def __init__(self, words: NDArray[np.int32], n_vocab: int) -> None:
        self._words = words
        bits = unpack(words, n_vocab)
        n_allowed = int(np.count_nonzero(bits))
        if n_allowed == 0:
            raise EngineError("The grammar allows no token to follow.")
        self.allowed: NDArray[np.int32] | None = None
        self.forbidden: NDArray[np.int32] | None = None
        self.only: TokenId | None = None
        if n_vocab - n_allowed <= n_vocab // 8:
            self.forbidden = np.flatnonzero(~bits).astype(np.int32)
        else:
            self.allowed = np.flatnonzero(bits).astype(np.int32)
            self.only = int(self.allowed[0]) if n_allowed == 1 else None

    def __contains__(self, token: TokenId) -> bool:
        return bool(self._words[token >> 5] >> (token & 31) & 1)

    def joined(self, others: NDArray[np.int32], n_vocab: int) -> Mask:
        """Allow these tokens too."""
        bits = unpack(self._words, n_vocab).copy()
        bits[others] = True
        return Mask(pack(bits), n_vocab)

    def ids(self, n_vocab: int) -> NDArray[np.int32]:
        """Return the ids of the allowed tokens, in order."""
        if self.allowed is not None:
            return self.allowed
        return np.flatnonzero(unpack(self._words, n_vocab)).astype(np.int32)

    def without(self, banned: NDArray[np.int32], ends: NDArray[np.int32], n_vocab: int) -> Mask:
        """Take away what the request forbids.

        Where nothing but the end of the output is allowed, it stays: the grammar is over.

        Raises:
            InvalidRequestError: nothing is left.
        """
        bits = unpack(self._words, n_vocab).copy()
        bits[banned] = False
        if not bits.any():
            bits[ends] = unpack(self._words, n_vocab)[ends]
        if not bits.any():
            raise InvalidRequestError(
                "'logit_bias' forbids every token that the grammar allows next.",
                param="logit_bias",
            )
        return Mask(pack(bits), n_vocab)


def of(ids: NDArray[np.int32], n_vocab: int) -> Mask:
    """Allow some tokens, and no other.

    Raises:
        EngineError: there are none.
    """
    bits = np.zeros(n_vocab, dtype=np.bool_)
    bits[ids] = True
    return Mask(pack(bits), n_vocab)


def all_but(ids: NDArray[np.int32], n_vocab: int) -> Mask:
    """Allow all tokens but some."""
    bits = np.ones(n_vocab, dtype=np.bool_)
    bits[ids] = False
    return Mask(pack(bits), n_vocab)


def unpack(words: NDArray[np.int32], n_vocab: int) -> NDArray[np.bool_]:
    """Turn bits into booleans."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:n_vocab].view(np.bool_)


def pack(bits: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Turn booleans into bits."""
    packed = np.zeros(-(-len(bits) // 32) * 4, dtype=np.uint8)
    packed[: -(-len(bits) // 8)] = np.packbits(bits, bitorder="little")
    return packed.view(np.int32)
