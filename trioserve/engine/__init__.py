"""The inference engine: slots, continuous batching, the queue and the inference thread.

It depends on the `Backend` protocol, not on llama.cpp, Trio or HTTP. `Engine` generates text,
`EmbeddingEngine` makes embeddings and `SpeechEngine` speaks. Commands arrive in an inbox and events
leave through an outbox; all code in between is synchronous.

`engine` runs the steps. `scheduler` decides which requests have a slot, and which wait for a prefix
that another one is about to prefill; `queue` orders the others, `strategy` decides how many prompt
tokens a step takes, and `background` what requests of low priority get beside others. `cache`
tracks the KV cache, `output` samples tokens and turns them into text, and `drafts` guesses tokens,
so that one step can check several (speculative decoding).
"""

from trioserve.engine.backend import AnyBackend, Backend, Drafter, DraftRequest, EmbeddingBackend
from trioserve.engine.cache.disk_cache import DiskCache
from trioserve.engine.cache.prefix_cache import MAX_IDLE, CheckpointRules
from trioserve.engine.drafts.ngrams import NgramDrafter, NgramRules
from trioserve.engine.embedding import EmbeddingEngine
from trioserve.engine.engine import Engine
from trioserve.engine.speaker import SpeechBackend
from trioserve.engine.speech import SpeechEngine
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
    "DiskCache",
    "DraftRequest",
    "Drafter",
    "EmbeddingBackend",
    "EmbeddingEngine",
    "Engine",
    "NgramDrafter",
    "NgramRules",
    "PrefillPriority",
    "SpeechBackend",
    "SpeechEngine",
    "load_strategy",
]
