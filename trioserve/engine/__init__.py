"""The inference engine: slots, continuous batching, the queue and the inference thread.

It knows the `Backend` protocol and nothing of llama.cpp, Trio or HTTP. `Engine` generates text and
`EmbeddingEngine` makes embeddings. Commands come in through an inbox and events go out through an
outbox; in between, everything is synchronous code.

`engine` has the step, `scheduler` decides who is in it (also that a follower waits for what another
request is about to prefill), `queue` whose turn it is, and `strategy` how many prompt tokens a step
takes. `cache` knows what the KV cache holds, `output` samples tokens and turns them into text, and
`drafts` guesses tokens, so that one step can check several (speculative decoding).
"""

from trioserve.engine.backend import AnyBackend, Backend, Drafter, DraftRequest, EmbeddingBackend
from trioserve.engine.cache.prefix_cache import MAX_IDLE, CheckpointRules
from trioserve.engine.drafts.ngrams import NgramDrafter, NgramRules
from trioserve.engine.embedding import EmbeddingEngine
from trioserve.engine.engine import Engine
from trioserve.engine.strategy import (
    AnswersFirst,
    Balanced,
    BatchStrategy,
    DecodeMaximal,
    PrefillPriority,
    load_strategy,
)

__all__ = [
    "MAX_IDLE",
    "AnswersFirst",
    "AnyBackend",
    "Backend",
    "Balanced",
    "BatchStrategy",
    "CheckpointRules",
    "DecodeMaximal",
    "DraftRequest",
    "Drafter",
    "EmbeddingBackend",
    "EmbeddingEngine",
    "Engine",
    "NgramDrafter",
    "NgramRules",
    "PrefillPriority",
    "load_strategy",
]
