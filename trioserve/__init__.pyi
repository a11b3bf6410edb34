"""The public names, said once: type checkers read this, and ``__init__`` loads them from here."""

from ._version import __version__ as __version__
from .chat.deltas import (
    ContentDelta as ContentDelta,
    Delta as Delta,
    Message as Message,
    ReasoningDelta as ReasoningDelta,
    ToolCall as ToolCall,
    ToolCallArguments as ToolCallArguments,
    ToolCallStart as ToolCallStart,
)
from .chat.messages import (
    Audio as Audio,
    Image as Image,
    Video as Video,
)
from .chat.params import (
    ChatParams as ChatParams,
)
from .config import (
    Config as Config,
)
from .errors import (
    AdapterInUseError as AdapterInUseError,
    AmbiguousModelError as AmbiguousModelError,
    AuthenticationError as AuthenticationError,
    BackendMismatchError as BackendMismatchError,
    BodyTimeoutError as BodyTimeoutError,
    BridgeError as BridgeError,
    ConfigError as ConfigError,
    ContextLengthExceededError as ContextLengthExceededError,
    DeadlineExceededError as DeadlineExceededError,
    DecodeError as DecodeError,
    DecodeInterruptedError as DecodeInterruptedError,
    DiskFullError as DiskFullError,
    EncodeError as EncodeError,
    EncodeInterruptedError as EncodeInterruptedError,
    EngineError as EngineError,
    FetchError as FetchError,
    GatedModelError as GatedModelError,
    HashMismatchError as HashMismatchError,
    HubError as HubError,
    HubNotFoundError as HubNotFoundError,
    HubUnavailableError as HubUnavailableError,
    InputTooLongError as InputTooLongError,
    InsufficientQuotaError as InsufficientQuotaError,
    InvalidMediaError as InvalidMediaError,
    InvalidRequestError as InvalidRequestError,
    KVCacheFullError as KVCacheFullError,
    MemoryFullError as MemoryFullError,
    MethodNotAllowedError as MethodNotAllowedError,
    ModelFailedError as ModelFailedError,
    ModelLoadError as ModelLoadError,
    ModelLoadingError as ModelLoadingError,
    ModelNotLoadedError as ModelNotLoadedError,
    ModelProcessError as ModelProcessError,
    NoSummaryError as NoSummaryError,
    NotFoundError as NotFoundError,
    NothingToSummarizeError as NothingToSummarizeError,
    NotSupportedError as NotSupportedError,
    OutputError as OutputError,
    PayloadTooLargeError as PayloadTooLargeError,
    PermissionDeniedError as PermissionDeniedError,
    ProxyError as ProxyError,
    ProxyTimeoutError as ProxyTimeoutError,
    QueueFullError as QueueFullError,
    RateLimitError as RateLimitError,
    RecordDamagedError as RecordDamagedError,
    RecordTooLargeError as RecordTooLargeError,
    RequestEndedError as RequestEndedError,
    ServerClosingError as ServerClosingError,
    ServerSleepingError as ServerSleepingError,
    StalledReaderError as StalledReaderError,
    StoreError as StoreError,
    StoreFullError as StoreFullError,
    StoreInUseError as StoreInUseError,
    StreamStoppedError as StreamStoppedError,
    TemplateError as TemplateError,
    ThreadsUnsupportedError as ThreadsUnsupportedError,
    ToolCallDecidedError as ToolCallDecidedError,
    ToolError as ToolError,
    ToolFileError as ToolFileError,
    ToolRuntimeError as ToolRuntimeError,
    ToolServerError as ToolServerError,
    ToolTimeoutError as ToolTimeoutError,
    TooManyRequestsError as TooManyRequestsError,
    TranscriberError as TranscriberError,
    TrioServeError as TrioServeError,
    UnavailableError as UnavailableError,
    UnknownFileError as UnknownFileError,
    UnknownModelError as UnknownModelError,
    UnknownQuantError as UnknownQuantError,
    UnknownToolCallError as UnknownToolCallError,
    UnknownToolError as UnknownToolError,
    UnsupportedFieldError as UnsupportedFieldError,
    UpstreamError as UpstreamError,
    UpstreamTimeoutError as UpstreamTimeoutError,
    UpstreamUnavailableError as UpstreamUnavailableError,
    WebToolError as WebToolError,
)
from .remote.server import (
    AnyServer as AnyServer,
    RemoteServer as RemoteServer,
    RemoteStream as RemoteStream,
)
from .router.models import (
    ChildModels as ChildModels,
)
from .server import (
    Models as Models,
    RequestContext as RequestContext,
    Server as Server,
    ServerState as ServerState,
)
from .server.generation.embeddings import (
    Classification as Classification,
    Cut as Cut,
    Embeddings as Embeddings,
    Ranking as Ranking,
)
from .server.keywords import (
    ChatFields as ChatFields,
    CompletionFields as CompletionFields,
    ContextFields as ContextFields,
    RenderFields as RenderFields,
    SpeechFields as SpeechFields,
    TranscriptionFields as TranscriptionFields,
)
from .server.observers.observer import (
    RequestRecord as RequestRecord,
)
from .server.observers.telemetry import (
    Telemetry as Telemetry,
    TelemetryBatch as TelemetryBatch,
)
from .server.prompts.media import (
    MixedPrompt as MixedPrompt,
)
from .server.runs.events import (
    ApprovalGiven as ApprovalGiven,
    ApprovalNeeded as ApprovalNeeded,
    RunAnswer as RunAnswer,
    RunCall as RunCall,
    RunEnded as RunEnded,
    RunEvent as RunEvent,
    StepChunk as StepChunk,
    StepStarted as StepStarted,
    ToolCalled as ToolCalled,
    ToolOutput as ToolOutput,
    ToolReturned as ToolReturned,
    ToolStarted as ToolStarted,
)
from .server.runs.params import (
    AnyTool as AnyTool,
    RunFields as RunFields,
    RunParams as RunParams,
)
from .server.runs.run import (
    AgentRun as AgentRun,
)
from .server.speech.speech import (
    Speech as Speech,
    SpeechParams as SpeechParams,
    SpeechStream as SpeechStream,
)
from .server.stream import (
    ChatChunk as ChatChunk,
    ChatCompletion as ChatCompletion,
    ChatStream as ChatStream,
    Completion as Completion,
    Stream as Stream,
)
from .server.transcription.transcript import (
    Segment as Segment,
    Transcript as Transcript,
    TranscriptionParams as TranscriptionParams,
    Word as Word,
)
from .tools.functions import (
    tool_of as tool_of,
)
from .tools.tool import (
    Tool as Tool,
    ToolCallContext as ToolCallContext,
    ToolInfo as ToolInfo,
    ToolResult as ToolResult,
)
from .types import (
    CancelReason as CancelReason,
    Candidates as Candidates,
    Chunk as Chunk,
    EngineStatus as EngineStatus,
    Finished as Finished,
    FinishReason as FinishReason,
    GenerationParams as GenerationParams,
    Grammar as Grammar,
    ModelInfo as ModelInfo,
    Progress as Progress,
    Prompt as Prompt,
    PromptScores as PromptScores,
    SamplingParams as SamplingParams,
    SlotStatus as SlotStatus,
    StepRecord as StepRecord,
    Timings as Timings,
    TokenProb as TokenProb,
    TokenProbs as TokenProbs,
)
