"""The engine: slots, continuous batching and the inference thread.

It knows the `Backend` protocol and nothing of llama.cpp, Trio or HTTP. Commands come in through
an inbox and events go out through an outbox; in between, everything is synchronous code.
"""

from trioserve.engine.engine import Engine
from trioserve.engine.strategy import (
    Balanced,
    BatchStrategy,
    DecodeMaximal,
    PrefillPriority,
    load_strategy,
)

__all__ = [
    "Balanced",
    "BatchStrategy",
    "DecodeMaximal",
    "Engine",
    "PrefillPriority",
    "load_strategy",
]
