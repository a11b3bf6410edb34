"""What `Server.embed` and `Server.rerank` return: embeddings of some norm, and scores."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.errors import InvalidRequestError
from trioserve.types import Timings

Array = NDArray[np.float32]

#: With norm 0, the largest number of a vector becomes this.
_LARGEST = 32760.0


@attrs.frozen(eq=False)
class Embeddings:
    """The embeddings of some texts, in their order.

    An embedding has shape (width,); with pooling "none" it is a matrix (tokens, width).
    """

    vectors: tuple[Array, ...]
    n_tokens: tuple[int, ...]
    timings: Timings


@attrs.frozen
class Ranking:
    """The scores of some documents, in their order. Higher ones fit the query better."""

    scores: tuple[float, ...]
    n_tokens: tuple[int, ...]
    timings: Timings

    def best(self, n: int | None = None) -> tuple[int, ...]:
        """The places of the `n` best documents, or of all, the best one first."""
        order = sorted(range(len(self.scores)), key=lambda index: -self.scores[index])
        return tuple(order[:n])


@attrs.frozen(kw_only=True)
class Shape:
    """What is done to the embeddings that a model computes.

    Raises:
        InvalidRequestError: a value makes no sense.
    """

    #: -1: nothing; 0: the largest becomes 32760; 1: taxicab; 2: Euclidean; p: p-norm.
    normalize: int = 2
    #: Keep that many numbers of each embedding, and give these the norm; None: all.
    dimensions: int | None = None

    def __attrs_post_init__(self) -> None:
        if not -1 <= self.normalize < 2**31:
            raise InvalidRequestError(
                "'embd_normalize' must be -1, 0 or a positive number.", param="embd_normalize"
            )
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequestError("'dimensions' must be at least 1.", param="dimensions")

    def check(self, width: int) -> None:
        """Refuse more dimensions than a model has. Raises InvalidRequestError."""
        if self.dimensions is not None and self.dimensions > width:
            raise InvalidRequestError(
                f"'dimensions' is {self.dimensions}, and the model's embeddings have {width}.",
                param="dimensions",
            )

    def apply(self, pooled: Sequence[Array]) -> tuple[Array, ...]:
        """Cut and normalize embeddings, each of shape (1, width). Returns each of shape (n,)."""
        matrix = np.concatenate(pooled)[:, : self.dimensions]
        sizes = _norms(matrix.astype(np.float64), self.normalize)
        # As in llama.cpp: divided in double, rounded, then multiplied.
        factors = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        return tuple(matrix * factors.astype(np.float32)[:, np.newaxis])


def _norms(matrix: NDArray[np.float64], norm: int) -> NDArray[np.float64]:
    """The size of each row, by a norm of `Shape`."""
    if norm == -1:
        return np.ones(len(matrix))
    if norm == 0:
        return np.asarray(np.abs(matrix).max(axis=1) / _LARGEST)
    return np.asarray(np.linalg.norm(matrix, ord=norm, axis=1))
