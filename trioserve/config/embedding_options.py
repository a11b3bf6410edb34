"""`EmbeddingOptions`: the options of a server that makes vectors of texts, and no text.

They are a part of `trioserve.config.Config`. The names are llama-server's.
"""

from __future__ import annotations

import attrs

from trioserve.config.option import option
from trioserve.errors import ConfigError


@attrs.frozen(kw_only=True)
class EmbeddingOptions:
    """Whether there are embeddings, and how they are made.

    Raises:
        ConfigError: options contradict each other, or would have no effect.
    """

    embeddings: bool = option(
        False,
        "--embedding",
        "--embeddings",
        group="Embeddings",
        env="LLAMA_ARG_EMBEDDINGS",
        off=(),
        help="make embeddings of texts, and no text",
    )
    reranking: bool = option(
        False,
        "--rerank",
        "--reranking",
        group="Embeddings",
        env="LLAMA_ARG_RERANKING",
        off=(),
        help="rank documents, with a model that is made for it, and make no text",
    )
    pooling: str = option(
        "auto",
        "--pooling",
        group="Embeddings",
        env="LLAMA_ARG_POOLING",
        choices=("auto", "none", "mean", "cls", "last", "rank"),
        help="how the vectors of its tokens become that of a text; auto: as the file says",
    )
    embd_normalize: int = option(
        2,
        "--embd-normalize",
        group="Embeddings",
        least=-1,
        most=2**31 - 1,
        help="norm of the vectors when a request does not say; -1: none, 0: largest value 32760, "
        "1: taxicab, 2: Euclidean, P: p-norm",
    )

    @property
    def serves_embeddings(self) -> bool:
        """Whether the server makes embeddings or ranks, rather than text."""
        return self.embeddings or self.reranking

    def __attrs_post_init__(self) -> None:
        """Refuse what contradicts itself. Raises ConfigError."""
        if self.reranking and self.pooling not in ("auto", "rank"):
            raise ConfigError(f"pooling is {self.pooling!r}, and reranking needs 'rank'")
        if self.pooling != "auto" and not self.serves_embeddings:
            raise ConfigError("pooling has no effect without embeddings or reranking")
