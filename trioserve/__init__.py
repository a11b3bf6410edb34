"""trioserve: an LLM server on Trio, with llama.cpp underneath.

    async with trioserve.Server() as server:
        completion = await server.chat([{"role": "user", "content": "Say hello"}])

The names here are the public ones. Each is loaded when it is first used, so that importing
trioserve is cheap, and llama.cpp is not loaded before a model is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trioserve._version import __version__

if TYPE_CHECKING:
    from trioserve.chat.deltas import (
        ContentDelta,
        Delta,
        Message,
        ReasoningDelta,
        ToolCall,
        ToolCallArguments,
        ToolCallStart,
    )
    from trioserve.config import Config
    from trioserve.errors import (
        AuthenticationError,
        BackendMismatchError,
        BridgeError,
        ConfigError,
        ContextLengthExceededError,
        DeadlineExceededError,
        DecodeError,
        EngineError,
        InputTooLongError,
        InvalidRequestError,
        KVCacheFullError,
        MethodNotAllowedError,
        ModelLoadError,
        ModelLoadingError,
        NotFoundError,
        NotSupportedError,
        PayloadTooLargeError,
        QueueFullError,
        RequestEndedError,
        ServerClosingError,
        StalledReaderError,
        TemplateError,
        TrioServeError,
        UnavailableError,
        UnsupportedFieldError,
    )
    from trioserve.server import Server
    from trioserve.stream import ChatChunk, ChatCompletion, ChatStream, Completion, Stream
    from trioserve.types import (
        CancelReason,
        Chunk,
        EngineStatus,
        Finished,
        FinishReason,
        Grammar,
        ModelInfo,
        Options,
        Progress,
        SamplingParams,
        SlotStatus,
        Timings,
        TokenProb,
        TokenProbs,
    )
    from trioserve.vectors import Embeddings, Ranking

__all__ = [
    "AuthenticationError",
    "BackendMismatchError",
    "BridgeError",
    "CancelReason",
    "ChatChunk",
    "ChatCompletion",
    "ChatStream",
    "Chunk",
    "Completion",
    "Config",
    "ConfigError",
    "ContentDelta",
    "ContextLengthExceededError",
    "DeadlineExceededError",
    "DecodeError",
    "Delta",
    "Embeddings",
    "EngineError",
    "EngineStatus",
    "FinishReason",
    "Finished",
    "Grammar",
    "InputTooLongError",
    "InvalidRequestError",
    "KVCacheFullError",
    "Message",
    "MethodNotAllowedError",
    "ModelInfo",
    "ModelLoadError",
    "ModelLoadingError",
    "NotFoundError",
    "NotSupportedError",
    "Options",
    "PayloadTooLargeError",
    "Progress",
    "QueueFullError",
    "Ranking",
    "ReasoningDelta",
    "RequestEndedError",
    "SamplingParams",
    "Server",
    "ServerClosingError",
    "SlotStatus",
    "StalledReaderError",
    "Stream",
    "TemplateError",
    "Timings",
    "TokenProb",
    "TokenProbs",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "TrioServeError",
    "UnavailableError",
    "UnsupportedFieldError",
    "__version__",
]

_HOMES = {
    "trioserve.chat.deltas": (
        "ContentDelta",
        "Delta",
        "Message",
        "ReasoningDelta",
        "ToolCall",
        "ToolCallArguments",
        "ToolCallStart",
    ),
    "trioserve.config": ("Config",),
    "trioserve.server": ("Server",),
    "trioserve.stream": ("ChatChunk", "ChatCompletion", "ChatStream", "Completion", "Stream"),
    "trioserve.types": (
        "CancelReason",
        "Chunk",
        "EngineStatus",
        "Finished",
        "FinishReason",
        "Grammar",
        "ModelInfo",
        "Options",
        "Progress",
        "SamplingParams",
        "SlotStatus",
        "Timings",
        "TokenProb",
        "TokenProbs",
    ),
    "trioserve.vectors": ("Embeddings", "Ranking"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trioserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "trioserve.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
