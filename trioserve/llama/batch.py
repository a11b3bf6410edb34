"""Batch: the tokens of the next decode, in arrays that C reads in place.

row           0    1    2    3   …  capacity - 1
token        17   12    5  900
position     40   41    0    1
sequence      0    0    3    3        each token belongs to one sequence
logits        0    1    0    0        1: asked for
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioserve.errors import EngineError
from trioserve.llama.library import lib
from trioserve.types import TokenId


class Batch:
    """At most `capacity` tokens. Allocated once and refilled each step; nothing to release.

    Raises:
        EngineError: from methods that add, when the batch is full, or a token, position or
            sequence does not exist. The batch has not changed then.
    """

    def __init__(self, capacity: int, *, n_vocab: int, n_seqs: int) -> None:
        self._capacity = capacity
        self._n_vocab = n_vocab
        self._n_seqs = n_seqs
        self._size = 0
        self._token = np.zeros(capacity, dtype=np.int32)
        self._pos = np.zeros(capacity, dtype=np.int32)
        self._seq = np.zeros(capacity, dtype=np.int32)
        self._logits = np.zeros(capacity, dtype=np.int8)
        # For each token, C takes a count of sequences and a pointer to them: always one, its own.
        self._one = np.ones(capacity, dtype=np.int32)
        self._seq_pointers = self._seq.ctypes.data + 4 * np.arange(capacity, dtype=np.uintp)
        # Assigning one item through a memoryview takes half as long as through numpy.
        self._tokens, self._positions = self._token.data, self._pos.data
        self._seqs, self._flags = self._seq.data, self._logits.data
        self._range = np.arange(capacity, dtype=np.int32)
        self._struct = self._make_struct()

    def __len__(self) -> int:
        return self._size

    def clear(self) -> None:
        """Forget all tokens."""
        self._size = 0

    def add(self, token: TokenId, pos: int, seq: int, *, logits: bool) -> int:
        """Append one token; returns its row. `logits` asks for the row's logits."""
        row = self._size
        if not (
            row < self._capacity
            and 0 <= token < self._n_vocab
            and 0 <= seq < self._n_seqs
            and 0 <= pos < 2**31
        ):
            self._refuse(1, token, pos, seq)
        self._tokens[row] = token
        self._positions[row] = pos
        self._seqs[row] = seq
        self._flags[row] = logits
        self._size = row + 1
        return row

    def add_each(
        self, tokens: Sequence[TokenId], positions: Sequence[int], seqs: Sequence[int]
    ) -> range:
        """Append one token to each of some sequences, with logits; returns their rows."""
        start, end = self._size, self._size + len(tokens)
        if not (
            end <= self._capacity
            and _fill(self._token[start:end], tokens, self._n_vocab)
            and _fill(self._pos[start:end], positions, 2**31)
            and _fill(self._seq[start:end], seqs, self._n_seqs)
        ):
            self._refuse(len(tokens), _worst(tokens), _worst(positions), _worst(seqs))
        self._logits[start:end] = 1
        self._size = end
        return range(start, end)

    def extend(self, tokens: Sequence[TokenId], pos: int, seq: int) -> int:
        """Append tokens at positions ``pos, pos + 1, …``, without logits; returns the last row.

        Without tokens, that is the row before.
        """
        start, count = self._size, len(tokens)
        end = start + count
        if not (
            end <= self._capacity and 0 <= seq < self._n_seqs and 0 <= pos <= 2**31 - 1 - count
        ):
            self._refuse(count, 0, pos, seq)
        if count:
            chunk = self._token[start:end]
            try:
                chunk[:] = tokens
            except OverflowError:
                chunk[0] = -1  # a token that does not exist
            lowest, highest = int(chunk.min()), int(chunk.max())
            if lowest < 0 or highest >= self._n_vocab:
                self._refuse(count, min(lowest, 0) or highest, pos, seq)
            np.add(self._range[:count], pos, out=self._pos[start:end])
            self._seq[start:end] = seq
            self._logits[start:end] = 0
            self._size = end
        return end - 1

    def want_logits(self, row: int) -> None:
        """Ask for the logits of a row that has been added."""
        if not 0 <= row < self._size:
            raise EngineError(f"The batch has no row {row}; it has {self._size}.")
        self._flags[row] = 1

    def want_all(self) -> None:
        """Ask for the logits, or the embeddings, of all rows."""
        self._logits[: self._size] = 1

    def seal(self) -> Any:
        """Return the structure that `llama_decode` takes, with the tokens added so far."""
        self._struct.n_tokens = self._size
        return self._struct

    def rows(self) -> bytes:
        """Return a byte for each row: 1 where logits were asked for."""
        return self._logits[: self._size].tobytes()

    def starts(self) -> dict[int, int]:
        """Return the first position of each sequence in it."""
        seqs, rows = np.unique(self._seq[: self._size], return_index=True)
        return dict(zip(seqs.tolist(), self._pos[rows].tolist(), strict=True))

    def _refuse(self, count: int, token: int, pos: int, seq: int) -> None:
        if self._size + count > self._capacity:
            raise EngineError(
                f"The batch holds {self._size} of {self._capacity} tokens, and {count} more "
                "do not fit."
            )
        raise EngineError(
            f"A batch takes tokens from 0 to {self._n_vocab - 1} and sequences from 0 to "
            f"{self._n_seqs - 1}; got token {token} at position {pos} of sequence {seq}."
        )

    def _make_struct(self) -> Any:
        def pointer(array: Any, kind: Any) -> Any:
            return array.ctypes.data_as(ctypes.POINTER(kind))

        struct = lib.llama_batch()
        struct.token = pointer(self._token, ctypes.c_int32)
        struct.embd = None
        struct.pos = pointer(self._pos, ctypes.c_int32)
        struct.n_seq_id = pointer(self._one, ctypes.c_int32)
        struct.seq_id = pointer(self._seq_pointers, ctypes.POINTER(ctypes.c_int32))
        struct.logits = pointer(self._logits, ctypes.c_int8)
        return struct


def _fill(row: NDArray[np.int32], values: Sequence[int], bound: int) -> bool:
    """Copy values; returns whether all of them are from 0 to below the bound."""
    try:
        row[:] = values
    except OverflowError:
        return False
    return not values or (int(row.min()) >= 0 and int(row.max()) < bound)


def _worst(values: Sequence[int]) -> int:
    """Return the value that is furthest from being in range."""
    return min(0, *values) or max(values, default=0)
