"""The messages between layers: what a request asks of the engine, and what comes back.

All are frozen: a message that left its maker never changes. Times are in seconds (floats from a
monotonic clock) unless a name ends in ``_ms``.
"""

from trioserve.types.events import (
    AdapterInfo as AdapterInfo,
    Admitted as Admitted,
    CancelReason as CancelReason,
    Candidates as Candidates,
    Chunk as Chunk,
    Chunks as Chunks,
    DraftCounts as DraftCounts,
    Embedded as Embedded,
    EngineCounters as EngineCounters,
    EngineEvent as EngineEvent,
    EngineStatus as EngineStatus,
    Event as Event,
    Failed as Failed,
    FimTokens as FimTokens,
    Finished as Finished,
    FinishReason as FinishReason,
    ModelInfo as ModelInfo,
    Preempted as Preempted,
    Progress as Progress,
    PromptScores as PromptScores,
    Returned as Returned,
    SlotState as SlotState,
    SlotStatus as SlotStatus,
    SlotTask as SlotTask,
    Spoken as Spoken,
    StepRecord as StepRecord,
    Timings as Timings,
    TokenProb as TokenProb,
    TokenProbs as TokenProbs,
    WaitingStatus as WaitingStatus,
)
from trioserve.types.media import (
    CellKey as CellKey,
    DecodedAudio as DecodedAudio,
    DecodedDocument as DecodedDocument,
    DecodedImage as DecodedImage,
    DecodedMedia as DecodedMedia,
    DecodedPage as DecodedPage,
    DecodedVideo as DecodedVideo,
    DocumentSource as DocumentSource,
    MediaChunk as MediaChunk,
    MediaKind as MediaKind,
    MediaSource as MediaSource,
    Modalities as Modalities,
    content_id as content_id,
)
from trioserve.types.params import (
    DEFAULT_SAMPLERS as DEFAULT_SAMPLERS,
    MAX_OUTPUTS as MAX_OUTPUTS,
    MAX_SALT as MAX_SALT,
    MAX_SCALE as MAX_SCALE,
    SAMPLER_LETTERS as SAMPLER_LETTERS,
    SAMPLER_NAMES as SAMPLER_NAMES,
    GenerationParams as GenerationParams,
    Grammar as Grammar,
    SamplingParams as SamplingParams,
    Thinking as Thinking,
    TokenId as TokenId,
)
from trioserve.types.speech import (
    AnyTask as AnyTask,
    Sound as Sound,
    SpeechTask as SpeechTask,
    Voice as Voice,
)
from trioserve.types.task import (
    Adapters as Adapters,
    Aside as Aside,
    CacheRoot as CacheRoot,
    Constraint as Constraint,
    EmbeddingTask as EmbeddingTask,
    Prompt as Prompt,
    Task as Task,
    ThinkingBudget as ThinkingBudget,
    place_of as place_of,
)
