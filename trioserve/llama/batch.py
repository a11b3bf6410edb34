"""LlamaBatch: the tokens of the next decode, in arrays that C reads in place.

row           0    1    2    3   …  capacity - 1
token        17   12    5  900
position     40   41    0    1
sequence      0    0    3    3        each token belongs to one sequence
logits        0    1    0    0        1: asked for
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioserve.engine.backend import MediaPiece
from trioserve.engine.speaker import Rows
from trioserve.errors import EngineError
from trioserve.llama.context import Context
from trioserve.llama.library import lib
from trioserve.llama.media.chunks import N_SECTIONS
from trioserve.types import TokenId

#: So few tokens are added one by one: numpy takes longer to begin.
FEW = 8


class LlamaBatch:
    """At most `capacity` tokens. Allocated once and refilled each step; nothing to release.

    With a `width`, each token comes with a row of as many numbers, for `put_rows`.

    Raises:
        EngineError: from methods that add, when the batch is full, or a token, position or
            sequence does not exist. The batch has not changed then.
    """

    def __init__(self, capacity: int, *, n_vocab: int, n_seqs: int, width: int = 0) -> None:
        self._capacity = capacity
        self._n_vocab = n_vocab
        self._n_seqs = n_seqs
        self._size = 0
        self._token = np.zeros(capacity, dtype=np.int32)
        self._pos = np.zeros(capacity, dtype=np.int32)
        self._seq = np.zeros(capacity, dtype=np.int32)
        self._logits = np.zeros(capacity, dtype=np.int8)
        self._rows = np.zeros((capacity, width), dtype=np.float32)
        # Assigning one item through a memoryview takes half as long as through numpy.
        self._tokens, self._positions = self._token.data, self._pos.data
        self._seqs, self._flags = self._seq.data, self._logits.data
        self._range = np.arange(capacity, dtype=np.int32)
        self._struct = _struct(self._pos, self._seq, self._logits)
        self._struct.token = _pointer(self._token, ctypes.c_int32)
        self._struct.embd = _pointer(self._rows, ctypes.c_float) if width else None

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
        if len(tokens) <= FEW:
            try:
                for token, pos, seq in zip(tokens, positions, seqs, strict=True):
                    self.add(token, pos, seq, logits=True)
            except EngineError:
                self._size = start
                raise
            return range(start, end)
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

    def advance(self, tokens: Sequence[TokenId]) -> None:
        """Replace the tokens of all rows; each row is one position further than before."""
        size = self._size
        if size <= FEW and len(tokens) == size:
            for row, token in enumerate(tokens):
                pos = self._positions[row]
                if not (0 <= token < self._n_vocab and pos < 2**31 - 1):
                    self._size = 0  # some of its tokens may have been replaced
                    self._refuse(1, token, pos + 1, 0)
                self._tokens[row], self._positions[row] = token, pos + 1
            return
        positions = self._pos[:size]
        if not (
            len(tokens) == size
            and _fill(self._token[:size], tokens, self._n_vocab)
            and (not size or int(positions.max()) < 2**31 - 1)
        ):
            self._size = 0
            self._refuse(len(tokens), _worst(tokens), int(positions.max(initial=-1)) + 1, 0)
        positions += 1

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

    def put_rows(self, start: int, rows: NDArray[np.float32]) -> None:
        """Set the rows of numbers of the tokens from the row `start` on."""
        self._rows[start : start + len(rows)] = rows

    def content(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return the tokens, positions and sequences of all rows, until it changes."""
        size = self._size
        return self._token[:size], self._pos[:size], self._seq[:size]

    def seal(self) -> tuple[Any, bytes]:
        """Return what `llama_decode` takes, with the tokens added so far, and a byte for each row.

        That is 1 where logits were asked for.
        """
        self._struct.n_tokens = self._size
        return self._struct, self._flags[: self._size].tobytes()

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


class _NumberBatch:
    """Rows of numbers in place of tokens. Subclasses set which of them have logits."""

    def __init__(
        self, rows: NDArray[np.float32], positions: NDArray[np.int32], seqs: NDArray[np.int32]
    ) -> None:
        self._rows = np.ascontiguousarray(rows, dtype=np.float32)
        self._positions = np.ascontiguousarray(positions)
        self._seqs = seqs
        self._logits = np.zeros(len(rows), dtype=np.int8)

    def __len__(self) -> int:
        return len(self._rows)

    def seal(self) -> tuple[Any, bytes]:
        """Return what `llama_decode` takes, and a byte for each row: 1 if it has logits."""
        struct = _struct(self._positions, self._seqs, self._logits)
        struct.n_tokens = len(self)
        struct.embd = _pointer(self._rows, ctypes.c_float)
        return struct, self._logits.tobytes()

    def starts(self) -> dict[int, int]:
        """Return the first position of each sequence in it."""
        rows = np.unique(self._seqs, return_index=True)
        return {int(seq): int(self._positions[0, row]) for seq, row in zip(*rows, strict=True)}


class MediaBatch(_NumberBatch):
    """Pieces of chunks: of several sequences, or one chunk that is not causal.

    With `wants_all`, each row has an output.

    Raises:
        EngineError: they are more than a batch holds, or not what the context takes.
    """

    def __init__(
        self,
        pieces: Sequence[MediaPiece],
        *,
        width: int,
        n_seqs: int,
        has_sections: bool,
        wants_all: bool = False,
    ) -> None:
        for piece in pieces:
            _check(piece, width, n_seqs, is_alone=len(pieces) == 1)
        sizes = [piece.stop - piece.start for piece in pieces]
        #: The row of the last cell of each piece.
        self.last_rows = [int(end) - 1 for end in np.cumsum(sizes)]
        self.is_causal = all(piece.chunk.is_causal for piece in pieces)
        #: Cells exist at the first position already. Then no decode may be cut off
        #: there, which would take these away as well.
        self.goes_on = has_sections and any(piece.start > 0 for piece in pieces)
        positions = [
            piece.chunk.content.positions_from(piece.start, piece.stop, piece.pos)
            for piece in pieces
        ]
        super().__init__(
            np.concatenate([one.embeddings[one.start : one.stop] for one in pieces]),
            np.concatenate(positions, axis=1),
            np.repeat(np.array([one.seq for one in pieces], dtype=np.int32), sizes),
        )
        if len(self._positions) != (N_SECTIONS if has_sections else 1):
            raise EngineError("The chunk was prepared for another model.")
        self._logits[:] = wants_all
        self._logits[self.last_rows] = [piece.logits for piece in pieces]


class RowBatch(_NumberBatch):
    """Rows of one sequence, for a head. With `logits`, each row has an output."""

    def __init__(
        self, rows: NDArray[np.float32], pos: int, seq: int, *, logits: bool = False
    ) -> None:
        size = len(rows)
        # A model with sections of positions takes as many of these rows as it has sections.
        positions = np.zeros((N_SECTIONS, size), dtype=np.int32)
        positions[:3] = np.arange(pos, pos + size, dtype=np.int32)
        super().__init__(rows, positions, np.full(size, seq, dtype=np.int32))
        self._logits[:] = logits


class RowsBatch(_NumberBatch):
    """Rows of several sequences, for a model that speaks. Each of them has an output.

    Raises:
        EngineError: a sequence or a position does not exist.
    """

    def __init__(self, batch: Sequence[Rows], *, n_sections: int, n_seqs: int) -> None:
        for part in batch:
            if not (0 <= part.seq < n_seqs and 0 <= part.pos < 2**31 - len(part.rows)):
                raise EngineError(f"There is no position {part.pos} of a sequence {part.seq}.")
        sizes = [len(part.rows) for part in batch]
        #: The last row of each part.
        self.last_rows = [int(end) - 1 for end in np.cumsum(sizes)]
        positions = [
            np.arange(part.pos, part.pos + size, dtype=np.int32)
            for part, size in zip(batch, sizes, strict=True)
        ]
        super().__init__(
            np.concatenate([part.rows for part in batch]),
            np.tile(np.concatenate(positions), (n_sections, 1)),
            np.repeat(np.array([part.seq for part in batch], dtype=np.int32), sizes),
        )
        self._logits[:] = 1


def decode_pieces(
    context: Context,
    pieces: Sequence[MediaPiece],
    width: int,
    *,
    has_sections: bool,
    wants_all: bool = False,
) -> list[int]:
    """Decode pieces of chunks; returns the row of the last cell of each. Arguments as `MediaBatch`.

    Raises:
        EngineError: they are no batch; nothing has changed.
        KVCacheFullError: not enough free cells; nothing has changed.
        DecodeInterruptedError: the context was interrupted; nothing has changed.
        DecodeError: any other failure; the contents of the sequences are unknown.
    """
    batch = MediaBatch(
        pieces,
        width=width,
        n_seqs=context.n_seqs,
        has_sections=has_sections,
        wants_all=wants_all,
    )
    most = context.n_batch if batch.is_causal else context.n_ubatch
    if len(batch) > most:  # llama.cpp would end the process
        raise EngineError(f"A batch holds {most} cells, not {len(batch)}.")
    with ExitStack() as stack:
        if batch.goes_on:
            stack.enter_context(context.uninterrupted())
        if not batch.is_causal:
            lib.llama_set_causal_attn(context.handle, False)
            stack.callback(lib.llama_set_causal_attn, context.handle, True)
        context.decode(batch)
    return batch.last_rows


def _check(piece: MediaPiece, width: int, n_seqs: int, *, is_alone: bool) -> None:
    chunk = piece.chunk
    is_whole = (piece.start, piece.stop) == (0, chunk.n_cells)
    if not 0 <= piece.start < piece.stop <= chunk.n_cells:
        raise EngineError(f"A chunk of {chunk.n_cells} cells has none from {piece.start} on.")
    if not chunk.is_causal and not (is_whole and is_alone):
        raise EngineError("A chunk that is not causal is decoded whole and alone.")
    if piece.embeddings.shape != (chunk.n_cells, width):
        raise EngineError(f"Embeddings have the shape {piece.embeddings.shape}, "
                          f"not {chunk.n_cells, width}.")  # fmt: skip
    if not (0 <= piece.seq < n_seqs and 0 <= piece.pos < 2**31 - chunk.n_cells):
        raise EngineError(f"There is no position {piece.pos} of a sequence {piece.seq}.")


def _struct(positions: Any, seqs: Any, logits: Any) -> Any:
    """Make the structure for rows of these; each belongs to one sequence."""
    # For each row, C takes a count of sequences and a pointer to them.
    ones, size = np.ones(len(seqs), dtype=np.int32), np.uintp(seqs.itemsize)
    pointers = np.uintp(seqs.ctypes.data) + size * np.arange(len(seqs), dtype=np.uintp)
    struct = lib.llama_batch()
    struct.pos = _pointer(positions, ctypes.c_int32)
    struct.n_seq_id = _pointer(ones, ctypes.c_int32)
    struct.seq_id = _pointer(pointers, ctypes.POINTER(ctypes.c_int32))
    struct.logits = _pointer(logits, ctypes.c_int8)
    struct.kept = ones, pointers  # as long as C may read them
    return struct


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
