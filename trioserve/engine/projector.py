"""What the engine asks of a projector: what makes of images and sound what a model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.types import DecodedMedia, MediaChunk, Prompt

#: A row for each cell of a chunk: shape (n_cells, n_embd).
Embeddings = NDArray[np.float32]


@attrs.frozen(kw_only=True)
class MediaPiece:
    """Cells of a chunk that are to be decoded, in place of tokens, for one sequence.

    All of a chunk, unless it is causal.
    """

    chunk: MediaChunk
    embeddings: Embeddings = attrs.field(repr=False)
    start: int  # the first cell of it, in the chunk
    stop: int  # the last one, and one
    pos: int  # the position at which the chunk begins in the sequence
    seq: int
    logits: bool  # whether the last cell is to have logits


class Projector(Protocol):
    """What makes embeddings of media. It comes with a model, and fits that one only."""

    @property
    def sees(self) -> bool:
        """Whether it takes images, and so the frames of videos."""

    @property
    def hears(self) -> bool:
        """Whether it takes sound."""

    @property
    def audio_rate(self) -> int:
        """Samples a second of the sound that it takes; 0: it takes none."""

    @property
    def max_chunk(self) -> int:
        """The most cells of a chunk that is decoded whole; 0: there are no such chunks."""

    @property
    def bytes_per_cell(self) -> int:
        """What chunks take in memory for each of their cells before they are encoded, roughly."""

    def prepare(
        self,
        parts: Sequence[str | DecodedMedia],
        *,
        add_special: bool,
        parse_special: bool = True,
        stop: Callable[[int], bool] = lambda _n: False,
    ) -> Prompt:
        """Tokenize text, and cut media into chunks, with what the model wants around them.

        From any thread. `stop` is asked now and then whether nobody wants more than the cells so
        far; it gets their number.

        Raises:
            InvalidMediaError: the model cannot take one of the media; its `index` says which part.
            AbandonedError: `stop` said so.
        """

    def encode(self, chunk: MediaChunk) -> Embeddings:
        """Compute the embeddings of a chunk. From one thread, which may not be that of the model.

        Raises:
            EncodeInterruptedError: `interrupt` was called.
            EncodeError: it failed.
        """

    def interrupt(self) -> None:
        """End the `encode` that runs within milliseconds; without one, nothing. From any thread."""

    def set_threads(self, count: int) -> None:
        """Encode with so many threads, from the next node of the graph or the next chunk on."""
