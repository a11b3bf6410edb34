"""What the embedding engine asks of the world below it: a model that makes embeddings of texts.

With a projector, there may be media in the texts.
"""

from __future__ import annotations

import abc

import numpy as np
from numpy.typing import NDArray

from trioserve.engine.backend import Backend, Batch, MediaPiece, Projector, Vocab
from trioserve.types import ModelInfo, TokenId

#: Shape (rows, width).
Matrix = NDArray[np.float32]

#: How the embedding of a text is made of those of its tokens: not at all, their mean, the first
#: one, the last one, or scores that a head makes of one of them.
POOLINGS = ("none", "mean", "cls", "last", "rank")


class EmbeddingBackend(abc.ABC):
    """A loaded model, with a context that makes embeddings.

    Used by the inference thread alone, except `info`, `vocab` and `pair`, which any thread may use.
    """

    info: ModelInfo
    vocab: Vocab
    #: What makes embeddings of media, for cells of them; None: the model takes text only.
    projector: Projector | None
    #: The texts of one `compute`, each a sequence of its own, from position 0 on or continued.
    batch: Batch
    pooling: str
    #: Numbers in an embedding; with pooling "rank", scores of a text.
    width: int
    #: Requests that are worked on at the same time.
    n_slots: int
    #: Texts in one batch; sequence ids run from 0 to ``n_seqs - 1``.
    n_seqs: int
    #: The most tokens in one batch.
    n_batch: int
    #: Tokens of texts that are there at the same time, those of the batch included.
    n_ctx: int
    #: The most tokens that a text may have.
    n_ctx_seq: int
    #: Whether a text may come in parts, one batch after another. Its tokens see only those before.
    can_split: bool
    #: How many threads may compute a batch of few tokens, and one of many; see `Backend`.
    thread_choices: tuple[range, range]

    @abc.abstractmethod
    def set_threads(self, count: int) -> None:
        """Compute with so many threads from the next batch on."""

    @abc.abstractmethod
    def pair(self, query: str, document: str) -> tuple[TokenId, ...]:
        """Make of a query and a document the text that a ranking model gives a score to.

        Raises:
            InvalidRequestError: one of them cannot be encoded.
        """

    @abc.abstractmethod
    def compute(self) -> None:
        """Run the batch.

        Raises:
            KVCacheFullError: there was no room; nothing has changed.
            DecodeError: anything else; what the sequences hold is unknown.
        """

    @abc.abstractmethod
    def compute_media(self, piece: MediaPiece) -> None:
        """Run a batch of cells of a chunk. Raises as `compute`."""

    @abc.abstractmethod
    def pooled(self, seq: int) -> Matrix:
        """Return the embedding of a sequence, of its part in the last batch. Shape (1, width)."""

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> Matrix:
        """Return the embeddings of rows of the last batch, where there is no pooling."""

    @abc.abstractmethod
    def forget(self, seq: int) -> None:
        """Drop what a sequence holds."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. Closing twice is fine."""


#: What a loader may return. Which one it is decides what a server can do.
AnyBackend = Backend | EmbeddingBackend
