"""An embedding backend without a model: vectors that tell what was in the batch.

The vector of a token is ``(token, position, 1)``. With pooling "mean" the vector of a text is
their mean, with "cls" the first, with "last" and "rank" the last. A cell of media has the first
number of its embedding in place of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trioserve.engine import EmbeddingBackend
from trioserve.engine.backend import Matrix, MediaPiece
from trioserve.errors import DecodeError, DecodeInterruptedError, KVCacheFullError
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.testing.projector import embeddings_of
from trioserve.types import TokenId

Row = tuple[float, int, int]


class RecordingBatch:
    """The rows of the next `compute`: token, position, sequence."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []

    def clear(self) -> None:
        self.rows = []

    def extend(self, tokens: tuple[TokenId, ...], pos: int, seq: int) -> int:
        assert tokens
        self.rows += [(token, pos + i, seq) for i, token in enumerate(tokens)]
        assert len(self.rows) <= self.capacity
        return len(self.rows) - 1

    def add(self, token: TokenId, pos: int, seq: int, *, logits: bool) -> int:
        raise AssertionError("texts are added whole")

    def want_logits(self, row: int) -> None:
        raise AssertionError("all rows are wanted")


class ScriptedEmbedder(EmbeddingBackend):
    """Checks each batch as llama.cpp would, and keeps what was in it in `batches`."""

    def __init__(
        self,
        *,
        pooling: str = "mean",
        n_slots: int = 2,
        n_seqs: int = 4,
        n_batch: int = 16,
        n_ctx: int = 64,
        can_split: bool = True,
        projector: ScriptedProjector | None = None,
    ) -> None:
        scripted = ScriptedBackend()
        self.info, self.vocab = scripted.info, scripted.vocab
        self.pooling, self.can_split, self.width = pooling, can_split, 3
        self.n_slots, self.n_seqs, self.n_batch = n_slots, n_seqs, n_batch
        self.n_ctx = self.n_ctx_seq = n_ctx
        self.projector = projector
        self._recording = RecordingBatch(n_batch)
        self.batch = self._recording
        self.batches: list[list[Row]] = []
        #: For each sequence: the number of its cells, and the position of the next one.
        self.held: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        #: Raised by the next calls of `compute`, one each.
        self.failures: list[DecodeError] = []
        #: Called in the midst of each batch; an interrupt in it has an effect.
        self.meanwhile: Callable[[], None] = lambda: None
        self._is_interrupted = False
        self.n_full = 0  # how often there was no room
        self.closed = False
        self.thread_choices = (range(1, 2), range(1, 2))
        self.threads: list[int] = []

    def set_threads(self, count: int) -> None:
        self.threads.append(count)

    def pair(self, query: str, document: str, most: int | None = None) -> tuple[TokenId, ...]:
        return self.vocab.tokenize(query + document[:most])

    def compute(self) -> None:
        rows = self._recording.rows
        assert rows
        self._begin(len(rows))
        for _, pos, seq in rows:
            assert 0 <= seq < self.n_seqs
            assert pos == self.ends.get(seq, 0), "a gap, or a sequence that was not forgotten"
            self.ends[seq] = pos + 1
            self.held[seq] = self.held.get(seq, 0) + 1
        self.batches.append(rows)

    def compute_media(self, piece: MediaPiece) -> None:
        chunk, n_cells = piece.chunk, piece.stop - piece.start
        assert self.projector is not None and 0 <= piece.seq < self.n_seqs
        assert 0 < n_cells <= self.n_batch and (chunk.is_causal or n_cells == chunk.n_cells)
        assert np.array_equal(piece.embeddings, embeddings_of(chunk, self.projector.n_embd))
        self._begin(n_cells)
        assert piece.pos == self.ends.get(piece.seq, 0), "a gap"
        if piece.stop == chunk.n_cells:
            self.ends[piece.seq] = piece.pos + chunk.n_positions
        self.held[piece.seq] = self.held.get(piece.seq, 0) + n_cells
        numbers = piece.embeddings[piece.start : piece.stop, 0]
        self.batches.append([(float(number), piece.pos, piece.seq) for number in numbers])

    def interrupt(self) -> None:
        self._is_interrupted = True

    def _begin(self, n_cells: int) -> None:
        self.meanwhile()
        if self._is_interrupted:
            self._is_interrupted = False
            raise DecodeInterruptedError("interrupted")
        if self.failures:
            raise self.failures.pop(0)
        if sum(self.held.values()) + n_cells > self.n_ctx:
            self.n_full += 1
            raise KVCacheFullError("full")

    def _vectors(self, seq: int) -> Matrix:
        return np.array(
            [(token, pos, 1) for token, pos, own in self.batches[-1] if own == seq], np.float32
        )

    def pooled(self, seq: int) -> Matrix:
        vectors = self._vectors(seq)
        if self.pooling == "mean":
            return vectors.mean(axis=0, keepdims=True)
        return vectors[:1] if self.pooling == "cls" else vectors[-1:]

    def rows(self, start: int, stop: int) -> Matrix:
        rows = self.batches[-1][start:stop]
        return np.array([(token, pos, 1) for token, pos, _ in rows], np.float32)

    def forget(self, seq: int) -> None:
        self.held.pop(seq, None)
        self.ends.pop(seq, None)

    def close(self) -> None:
        self.closed = True
