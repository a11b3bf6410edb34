"""`EmbeddingRun`: a task in the embedding engine, and `Piece`: what of it is in a batch."""

from __future__ import annotations

from collections import deque
from time import monotonic

import attrs
import numpy as np

from trioserve.engine.embedding.backend import Matrix
from trioserve.engine.projector import Embeddings, MediaPiece
from trioserve.types import EmbeddingTask, MediaChunk, Prompt, SlotStatus, Timings, WaitingStatus


@attrs.define(eq=False)
class Piece:
    """Cells ``start <= i < stop`` of one text of a run, in a batch: tokens, or of one chunk.

    They are rows ``first_row, first_row + 1, …`` of it, and of the sequence `seq`.
    """

    run: EmbeddingRun
    index: int  # of the text
    start: int
    stop: int
    seq: int
    first_row: int = 0
    #: Of its chunk; None: it has tokens.
    embeddings: Embeddings | None = attrs.field(default=None, repr=False)

    @property
    def text(self) -> Prompt:
        """The text that it is of."""
        return self.run.task.texts[self.index]

    @property
    def n_cells(self) -> int:
        """How many cells are in the batch."""
        return self.stop - self.start

    def media(self) -> MediaPiece:
        """Say what of a chunk is to be computed."""
        span = self.text.span_from(self.start)
        assert span is not None and self.embeddings is not None
        first, chunk = span
        return MediaPiece(
            chunk=chunk,
            embeddings=self.embeddings,
            start=self.start - first,
            stop=self.stop - first,
            pos=self.text.position(first),
            seq=self.seq,
            logits=True,
        )

    @property
    def is_last(self) -> bool:
        """Whether the text ends here."""
        return self.stop == len(self.text)


@attrs.define
class Room:
    """What is left of a batch while it is filled."""

    rows: int
    cells: int  # of the KV cache
    seqs: list[int]
    takes_long: bool  # a text that comes in parts may begin


class EmbeddingRun:
    """What the engine knows of one task.

    The next cell for a batch is number `start` of text `index`.
    """

    first_in_line = False  # it is never preempted

    def __init__(self, task: EmbeddingTask) -> None:
        self.task = task
        self.submitted_at = monotonic()
        self.admitted_at: float | None = None
        self.slot = -1
        self.index = 0
        self.start = 0
        self.n_missing = len(task.texts)
        self.n_done = 0  # cells
        self.awaits_media = False  # the next one is of a chunk that is not encoded yet
        self._parts: list[list[Matrix]] = [[] for _ in task.texts]
        #: Its chunks, each with its text, and where it ends there. Those that are done go first.
        self._media: deque[tuple[int, int, MediaChunk]] = deque()
        if task.prompt.media:
            self._media.extend(
                (index, start + chunk.n_cells, chunk)
                for index, text in enumerate(task.texts)
                for start, chunk in text.spans
            )

    @property
    def chunk(self) -> MediaChunk | None:
        """The chunk that the next cell is of; None: that is a token, or there is none."""
        if not self._media or self.index == len(self.task.texts):
            return None
        return self.task.texts[self.index].part_from(self.start)[1]

    def media_ahead(self) -> list[MediaChunk]:
        """List the chunks that are not computed whole, in their order."""
        while self._media and self._media[0][:2] <= (self.index, self.start):
            self._media.popleft()
        return [chunk for _, _, chunk in self._media]

    def advance(self, piece: Piece) -> None:
        """Note that a piece is in the batch."""
        self.index, self.start = (
            (piece.index + 1, 0) if piece.is_last else (piece.index, piece.stop)
        )

    def go_back(self, piece: Piece) -> None:
        """Undo `advance`. The last piece goes first."""
        self.index, self.start = piece.index, piece.start

    def take(self, piece: Piece, embeddings: Matrix, pooling: str) -> None:
        """Take the embeddings of a piece.

        Where a text came in parts, they become those of the whole: the mean of all cells is that
        of the parts, weighted; the first embedding is that of the first part, and what comes from
        the last token is that of the last.
        """
        parts = self._parts[piece.index]
        self.n_done += piece.n_cells
        if pooling == "mean" and not (piece.start == 0 and piece.is_last):
            share = embeddings * np.float32(piece.n_cells / len(piece.text))
            parts[:] = [parts[0] + share] if parts else [share]
        elif pooling == "none":
            parts.append(embeddings)
        elif pooling != "cls" or not parts:
            parts[:] = [embeddings]
        self.n_missing -= piece.is_last

    def embeddings(self) -> tuple[Matrix, ...]:
        """Return a matrix for each text, once all are there."""
        return tuple(
            parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in self._parts
        )

    def is_finite(self) -> bool:
        """Whether all that the model made are numbers."""
        return all(bool(np.isfinite(part).all()) for parts in self._parts for part in parts)

    def timings(self) -> Timings:
        """How long it took, at its end."""
        assert self.admitted_at is not None
        return Timings(
            queue_ms=(self.admitted_at - self.submitted_at) * 1e3,
            prompt_n=self.n_done,
            prompt_ms=(monotonic() - self.admitted_at) * 1e3,
        )

    @staticmethod
    def slot_status(slot: int, n_ctx: int, run: EmbeddingRun | None) -> SlotStatus:
        """Describe a slot, with the run that has it, if one has."""
        return SlotStatus(
            id=slot,
            state="idle" if run is None else "prefill",
            n_ctx=n_ctx,
            task_id=None if run is None else run.task.id,
            n_prompt=0 if run is None else len(run.task.prompt),
            n_past=0 if run is None else run.n_done,
            n_cached=0,
            n_decoded=0,
            paused=False,
            encoding=run is not None and run.awaits_media,
        )

    def waiting_status(self, position: int, now: float) -> WaitingStatus:
        """Describe it while it waits."""
        return WaitingStatus(
            task_id=self.task.id,
            position=position,
            n_prompt=len(self.task.prompt),
            priority=self.task.priority,
            waited_s=now - self.submitted_at,
        )
