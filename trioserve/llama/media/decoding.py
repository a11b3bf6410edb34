"""MediaBatch: cells of media for `llama_decode`, in place of tokens.

Embeddings and tokens cannot share a batch. With M-RoPE a cell has a position for each section, and
C takes them section by section.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from trioserve.engine.backend import MediaPiece
from trioserve.errors import EngineError
from trioserve.llama.context import Context
from trioserve.llama.library import lib
from trioserve.llama.media.chunks import N_SECTIONS


class MediaBatch:
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
        self._size = sum(sizes)
        #: The row of the last cell of each piece.
        self.last_rows = [int(end) - 1 for end in np.cumsum(sizes)]
        self.is_causal = all(piece.chunk.is_causal for piece in pieces)
        #: Whether there are cells at the first position already. Then no decode may be cut off
        #: there, which would take these away as well.
        self.goes_on = has_sections and any(piece.start > 0 for piece in pieces)
        self._rows = np.concatenate([one.embeddings[one.start : one.stop] for one in pieces])
        self._rows = np.ascontiguousarray(self._rows, dtype=np.float32)
        positions = [
            piece.chunk.content.positions_from(piece.start, piece.stop, piece.pos)
            for piece in pieces
        ]
        self._positions = np.ascontiguousarray(np.concatenate(positions, axis=1))
        if len(self._positions) != (N_SECTIONS if has_sections else 1):
            raise EngineError("The chunk was prepared for another model.")
        self._seqs = np.repeat(np.array([one.seq for one in pieces], dtype=np.int32), sizes)
        self._ones = np.ones(self._size, dtype=np.int32)
        self._seq_pointers = self._seqs.ctypes.data + 4 * np.arange(self._size, dtype=np.uintp)
        self._logits = np.full(self._size, wants_all, dtype=np.int8)
        self._logits[self.last_rows] = [piece.logits for piece in pieces]

    def __len__(self) -> int:
        return self._size

    def seal(self) -> Any:
        """Return the structure that `llama_decode` takes."""
        struct = lib.llama_batch()
        struct.n_tokens = self._size
        struct.token = None
        struct.embd = _pointer(self._rows, ctypes.c_float)
        struct.pos = _pointer(self._positions, ctypes.c_int32)
        struct.n_seq_id = _pointer(self._ones, ctypes.c_int32)
        struct.seq_id = _pointer(self._seq_pointers, ctypes.POINTER(ctypes.c_int32))
        struct.logits = _pointer(self._logits, ctypes.c_int8)
        return struct

    def rows(self) -> bytes:
        """Return a byte for each row: 1 where logits were asked for."""
        return self._logits.tobytes()

    def starts(self) -> dict[int, int]:
        """Return the first position of each sequence in it."""
        rows = np.unique(self._seqs, return_index=True)
        return {int(seq): int(self._positions[0, row]) for seq, row in zip(*rows, strict=True)}


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
        DecodeError: anything else; what the sequences hold is unknown.
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


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
