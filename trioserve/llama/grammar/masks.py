"""Masks: which tokens a grammar allows next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trioserve.errors import InvalidRequestError, OutputError
from trioserve.types import TokenId


class Mask:
    """Which tokens may come next.

    `only` is the token if there is just one. `ids` and `forbidden` take a while to find, and are
    found when they are asked for.
    """

    __slots__ = ("_n_vocab", "_words", "allows_most", "only")

    def __init__(self, words: NDArray[np.int32], n_vocab: int) -> None:
        self._words, self._n_vocab = words, n_vocab
        # One large integer: it counts its bits ten times as fast as an array of booleans.
        bits = int.from_bytes(words.tobytes(), "little") & ((1 << n_vocab) - 1)
        n_allowed = bits.bit_count()
        if n_allowed == 0:
            raise OutputError("The grammar allows no token to follow.")
        self.only: TokenId | None = bits.bit_length() - 1 if n_allowed == 1 else None
        #: Whether so many tokens are allowed that it costs less to hide the others.
        self.allows_most = n_vocab - n_allowed <= n_vocab // 8

    def __contains__(self, token: TokenId) -> bool:
        return bool(self._words[token >> 5] >> (token & 31) & 1)

    @property
    def ids(self) -> NDArray[np.int32]:
        """The allowed tokens, in order."""
        return np.flatnonzero(self._bits).astype(np.int32)

    @property
    def forbidden(self) -> NDArray[np.int32]:
        """All others, in order."""
        return np.flatnonzero(~self._bits).astype(np.int32)

    @property
    def _bits(self) -> NDArray[np.bool_]:
        return unpack(self._words, self._n_vocab)

    def joined(self, others: NDArray[np.int32]) -> Mask:
        """Return a mask that allows these tokens too."""
        bits = self._bits.copy()
        bits[others] = True
        return Mask(pack(bits), self._n_vocab)

    def without(self, banned: NDArray[np.int32], ends: NDArray[np.int32]) -> Mask:
        """Return a mask without what the request forbids.

        Where only the end of the output is allowed, it stays allowed: the grammar is complete.

        Raises:
            InvalidRequestError: nothing is left.
        """
        bits = self._bits.copy()
        bits[banned] = False
        if not bits.any():
            bits[ends] = self._bits[ends]
        if not bits.any():
            raise InvalidRequestError(
                "'logit_bias' forbids every token that the grammar allows next.",
                param="logit_bias",
            )
        return Mask(pack(bits), self._n_vocab)


def none_but(ids: NDArray[np.int32], n_vocab: int) -> Mask:
    """Allow these tokens and no others.

    Raises:
        EngineError: there are none.
    """
    bits = np.zeros(n_vocab, dtype=np.bool_)
    bits[ids] = True
    return Mask(pack(bits), n_vocab)


def all_but(ids: NDArray[np.int32], n_vocab: int) -> Mask:
    """Allow all tokens but these."""
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
