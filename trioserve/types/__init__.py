"""The messages between layers: what a request asks of the engine, and what comes back.

All are frozen: a message that left its maker never changes. Times are in seconds (floats from a
monotonic clock) unless a name ends in ``_ms``.
"""

from __future__ import annotations

from trioserve.types.events import (
    Admitted,
    CancelReason,
    Candidates,
    Chunk,
    Chunks,
    Embedded,
    EngineEvent,
    Event,
    Failed,
    Finished,
    FinishReason,
    Preempted,
    Progress,
    Timings,
    TokenProb,
    TokenProbs,
)
from trioserve.types.media import (
    CellKey,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    MediaChunk,
    MediaKind,
    MediaSource,
    Modalities,
    content_id,
)
from trioserve.types.prompt import Prompt
from trioserve.types.sampling import (
    DEFAULT_SAMPLERS,
    SAMPLER_LETTERS,
    SAMPLER_NAMES,
    SamplingParams,
    TokenId,
)
from trioserve.types.status import (
    AdapterInfo,
    EngineCounters,
    EngineStatus,
    FimTokens,
    ModelInfo,
    SlotState,
    SlotStatus,
    WaitingStatus,
)
from trioserve.types.task import (
    GRAMMAR_KINDS,
    MAX_SALT,
    MAX_SCALE,
    Adapters,
    CacheRoot,
    Constraint,
    EmbeddingTask,
    GenerationParams,
    Grammar,
    Task,
    Thinking,
    ThinkingBudget,
)

#: The name of `GenerationParams` in earlier versions.
Options = GenerationParams

__all__ = [
    "DEFAULT_SAMPLERS",
    "GRAMMAR_KINDS",
    "MAX_SALT",
    "MAX_SCALE",
    "SAMPLER_LETTERS",
    "SAMPLER_NAMES",
    "AdapterInfo",
    "Adapters",
    "Admitted",
    "CacheRoot",
    "CancelReason",
    "Candidates",
    "CellKey",
    "Chunk",
    "Chunks",
    "Constraint",
    "DecodedAudio",
    "DecodedImage",
    "DecodedMedia",
    "DecodedVideo",
    "Embedded",
    "EmbeddingTask",
    "EngineCounters",
    "EngineEvent",
    "EngineStatus",
    "Event",
    "Failed",
    "FimTokens",
    "FinishReason",
    "Finished",
    "GenerationParams",
    "Grammar",
    "MediaChunk",
    "MediaKind",
    "MediaSource",
    "Modalities",
    "ModelInfo",
    "Options",
    "Preempted",
    "Progress",
    "Prompt",
    "SamplingParams",
    "SlotState",
    "SlotStatus",
    "Task",
    "Thinking",
    "ThinkingBudget",
    "Timings",
    "TokenId",
    "TokenProb",
    "TokenProbs",
    "WaitingStatus",
    "content_id",
]
