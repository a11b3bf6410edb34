"""The exceptions of trioserve: one tree, rooted in `TrioServeError`.

Each class maps to one HTTP status and one error ``type``, the pair that a client sees in
``{"error": {"code", "message", "type", "param"}}``. The names of the types are those of
llama-server and OpenAI.
"""

from trioserve.errors.ended import (
    AbandonedError as AbandonedError,
    BackendMismatchError as BackendMismatchError,
    DeadlineExceededError as DeadlineExceededError,
    DecodeError as DecodeError,
    DecodeInterruptedError as DecodeInterruptedError,
    EncodeError as EncodeError,
    EncodeInterruptedError as EncodeInterruptedError,
    EngineError as EngineError,
    KVCacheFullError as KVCacheFullError,
    OutputError as OutputError,
    RequestEndedError as RequestEndedError,
    StalledReaderError as StalledReaderError,
    StreamStoppedError as StreamStoppedError,
    TranscriberError as TranscriberError,
)
from trioserve.errors.refused import (
    AmbiguousModelError as AmbiguousModelError,
    AuthenticationError as AuthenticationError,
    ContextLengthExceededError as ContextLengthExceededError,
    InputTooLongError as InputTooLongError,
    InvalidMediaError as InvalidMediaError,
    InvalidRequestError as InvalidRequestError,
    MethodNotAllowedError as MethodNotAllowedError,
    ModelNotLoadedError as ModelNotLoadedError,
    NotFoundError as NotFoundError,
    NotSupportedError as NotSupportedError,
    PayloadTooLargeError as PayloadTooLargeError,
    PermissionDeniedError as PermissionDeniedError,
    QueueFullError as QueueFullError,
    RateLimitError as RateLimitError,
    TemplateError as TemplateError,
    TooManyRequestsError as TooManyRequestsError,
    UnknownModelError as UnknownModelError,
    UnsupportedFieldError as UnsupportedFieldError,
)
from trioserve.errors.root import (
    TrioServeError as TrioServeError,
)
from trioserve.errors.starting import (
    BridgeError as BridgeError,
    ConfigError as ConfigError,
    DiskFullError as DiskFullError,
    GatedModelError as GatedModelError,
    HashMismatchError as HashMismatchError,
    HubError as HubError,
    HubNotFoundError as HubNotFoundError,
    HubUnavailableError as HubUnavailableError,
    ModelLoadError as ModelLoadError,
    UnknownQuantError as UnknownQuantError,
)
from trioserve.errors.tools import (
    ProxyError as ProxyError,
    ProxyTimeoutError as ProxyTimeoutError,
    ToolCallDecidedError as ToolCallDecidedError,
    ToolError as ToolError,
    ToolFileError as ToolFileError,
    ToolRuntimeError as ToolRuntimeError,
    ToolServerError as ToolServerError,
    ToolTimeoutError as ToolTimeoutError,
    UnknownToolCallError as UnknownToolCallError,
    UnknownToolError as UnknownToolError,
)
from trioserve.errors.unavailable import (
    MemoryFullError as MemoryFullError,
    ModelFailedError as ModelFailedError,
    ModelLoadingError as ModelLoadingError,
    ModelProcessError as ModelProcessError,
    ServerClosingError as ServerClosingError,
    ServerSleepingError as ServerSleepingError,
    UnavailableError as UnavailableError,
)
