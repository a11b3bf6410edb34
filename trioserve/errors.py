"""The exceptions of trioserve: one tree, rooted in `TrioServeError`.

Each class maps to one HTTP status and one error ``type``, which a client sees in ``{"error":
{"code", "message", "type", "param"}}``. The names of the types are llama-server's and OpenAI's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self


class TrioServeError(Exception):
    """Root of everything that trioserve raises on purpose.

    `message` is one sentence for a person. `param` names the request field at fault, when one is.
    `retry_after` is in seconds. Of an error with `public`, a client gets that sentence, and the
    message is for the log.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    public: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def again(self) -> Self:
        """The same error, to raise in another task: this one keeps the frames it went through."""
        other = type(self).__new__(type(self), *self.args)
        other.__dict__.update(self.__dict__)
        other.__cause__ = self.__cause__
        return other


# -- requests that were running and ended badly, because of the engine or of others


class RequestEndedError(TrioServeError):
    """A request ended before it was finished, and not by its caller's own cancel scope."""


class DeadlineExceededError(RequestEndedError):
    """The deadline of the request has passed."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    def __init__(
        self, message: str = "The request's deadline has passed.", *, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)


class StalledReaderError(RequestEndedError):
    """The client stopped reading, and the limit for that passed."""

    status = 408
    type = "timeout_error"
    code = "stalled_reader"


class StreamStoppedError(RequestEndedError):
    """A DELETE has stopped the stream, or a newer one has the id of its conversation."""

    status = 409
    type = "invalid_request_error"
    code = "stream_stopped"


class EngineError(TrioServeError):
    """The engine could not continue this request, or any. The client does not learn why."""

    public: ClassVar[str | None] = "The inference engine failed."


class OutputError(EngineError):
    """The output of this request cannot be made: its grammar or its numbers do not allow it."""

    public = None


class DecodeError(EngineError):
    """`llama_decode` failed, or what it computed are not numbers."""


class KVCacheFullError(DecodeError):
    """There are no free cells in the KV cache for this batch."""

    code = "kv_cache_full"
    public = None


class DecodeInterruptedError(DecodeError):
    """`llama_decode` was ended early, because its prompt was cancelled. Nothing has changed."""


class EncodeError(EngineError):
    """The projector could not make embeddings of an image or of sound."""


class EncodeInterruptedError(EncodeError):
    """An image or sound is no longer wanted, and its encoding was ended early."""


class TranscriberError(TrioServeError):
    """The process that transcribes recordings has failed, or has ended."""

    public: ClassVar[str | None] = "The transcriber failed."


class BackendMismatchError(EngineError):
    """The installed llama.cpp lacks a function that trioserve calls."""

    public = None


# -- requests that are wrong, and get a status between 400 and 499


class InvalidRequestError(TrioServeError):
    """A field is missing, has the wrong type, or is out of range."""

    status = 400
    type = "invalid_request_error"

    @classmethod
    def at(cls, param: str, problem: str) -> Self:
        """Make the error of a field: its name, and what is wrong with it."""
        return cls(f"'{param}' {problem}", param=param)


class UnknownFileError(InvalidRequestError):
    """A request names an uploaded file that is not stored, or is another client's."""

    code = "file_not_found"


class ContextLengthExceededError(InvalidRequestError):
    """The prompt has more tokens than a sequence can hold."""

    type = "exceed_context_size_error"
    code = "context_length_exceeded"

    def __init__(self, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> None:
        number = f"at least {n_prompt_tokens}" if at_least else f"{n_prompt_tokens}"
        super().__init__(
            f"The prompt has {number} tokens, which exceeds the available context size of {n_ctx} "
            "tokens, with room for at least one token of output.",
            param="prompt",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class NothingToSummarizeError(InvalidRequestError):
    """A conversation that is to be compacted has no messages but rules."""

    code = "compaction_nothing_to_summarize"


class InputTooLongError(ContextLengthExceededError):
    """A text to be embedded or ranked has more tokens than the model can take."""

    def __init__(self, n_tokens: int, limit: int, message: str, *, param: str) -> None:
        InvalidRequestError.__init__(self, message, param=param)
        self.n_prompt_tokens = n_tokens
        self.n_ctx = limit


class BodyTimeoutError(InvalidRequestError):
    """The client has not sent its body in time."""

    status = 408


class UnknownModelError(InvalidRequestError):
    """There is no model of the name in the request."""

    status = 404
    code = "model_not_found"


class AmbiguousModelError(InvalidRequestError):
    """The name in the request is a part of the names of several models."""

    code = "model_ambiguous"


class AdapterInUseError(InvalidRequestError):
    """The LoRA adapter cannot be unloaded while a request runs or waits with it."""

    status = 409
    code = "adapter_in_use"


class ModelNotLoadedError(InvalidRequestError):
    """The model is not loaded, and the request or the configuration says not to load it."""

    code = "model_not_loaded"


class NotSupportedError(TrioServeError):
    """The request asks for something that this server, or the loaded model, does not do."""

    status = 501
    type = "not_supported_error"


class UnsupportedFieldError(InvalidRequestError):
    """A field is known, but this version gives it no effect; so it is refused, not ignored."""


class ThreadsUnsupportedError(UnsupportedFieldError):
    """A conversation should be kept by the server; the client sends all of it instead."""

    code = "thread_unsupported_request"


class InvalidMediaError(InvalidRequestError):
    """An image, a sound or a video cannot be read, or is larger than the limits allow.

    `index` says which one it is, where the error is raised for one of several.
    """

    code = "invalid_media"

    def __init__(self, message: str, *, param: str | None = None, index: int = 0) -> None:
        super().__init__(message, param=param)
        self.index = index


class FetchError(InvalidMediaError):
    """A URL cannot be fetched, or must not be. `reason` is a word for the cause."""

    def __init__(self, message: str, *, reason: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.reason = reason


class TemplateError(InvalidRequestError):
    """The chat template refuses the messages, or breaks one of the bounds it runs under."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)


class PermissionDeniedError(TrioServeError):
    """It is from a page of another site, or asks for what its API key may not do, see or use."""

    status = 403
    type = "permission_error"


class AuthenticationError(TrioServeError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"


class NotFoundError(TrioServeError):
    """No such route, model or slot."""

    status = 404
    type = "not_found_error"


class MethodNotAllowedError(TrioServeError):
    """The route exists, but not for this HTTP method."""

    status = 405
    type = "invalid_request_error"


class PayloadTooLargeError(TrioServeError):
    """The body of the request is larger than the server takes."""

    status = 413
    type = "invalid_request_error"


class TooManyRequestsError(TrioServeError):
    """The client asks for more than it may have now."""

    status = 429
    type = "rate_limit_error"
    retry_after: float


class QueueFullError(TooManyRequestsError):
    """More requests wait than the server allows."""

    code = "queue_full"


class RateLimitError(TooManyRequestsError):
    """The client has used up its requests or its tokens of this minute."""

    code = "rate_limit_exceeded"


class InsufficientQuotaError(TooManyRequestsError):
    """The API key has used up its tokens of this day, which ends at midnight UTC."""

    type = "insufficient_quota"
    code = "insufficient_quota"


# -- before a request: configuration, files, the operating system


class ConfigError(TrioServeError):
    """A flag, an environment variable or a configuration field has a value that cannot be used."""


class ModelLoadError(TrioServeError):
    """The model file is missing, is not a GGUF, is cut short, or does not fit in memory."""

    type = "unavailable_error"
    status = 503


class BridgeError(TrioServeError):
    """The descriptor that wakes the event loop could not be made."""


# -- models from the hub, and the cache that they are kept in


class HubError(TrioServeError):
    """A model cannot be downloaded, or the cache of downloaded models cannot be used."""

    status = 502


class HubUnavailableError(HubError):
    """The hub cannot be reached, or does not answer now."""

    type = "unavailable_error"
    status = 503


class HubNotFoundError(HubError):
    """The hub, or the cache, has no such repository or file."""

    type = "not_found_error"
    status = 404


class UnknownQuantError(HubNotFoundError):
    """The repository has no model with this quantization."""


class GatedModelError(HubError):
    """The hub gives the model only to those who have accepted its terms, and say who they are."""

    type = "permission_error"
    status = 403


class HashMismatchError(HubError):
    """A downloaded file does not have the hash that the hub tells."""


class DiskFullError(HubError):
    """There is no room for the model."""

    status = 507
    code = "disk_full"


# -- tools that cannot be run, or fail


class UnknownToolError(InvalidRequestError):
    """There is no such tool, or it cannot do what is asked, such as to stream its output."""

    status = 404
    code = "tool_not_found"


class UnknownToolCallError(NotFoundError):
    """There is no such call in this answer."""

    code = "tool_call_not_found"


class ToolCallDecidedError(InvalidRequestError):
    """The call does not wait for approval, or not any more; or it has ended already."""

    status = 409
    code = "tool_call_decided"


class ToolRuntimeError(TrioServeError):
    """The place where tools are to run does not exist, or it cannot be reached.

    The status is llama-server's.
    """

    code = "tool_runtime"


class ToolError(TrioServeError):
    """A tool could not be run, or has failed. The model gets this as the result of its call."""

    code = "tool_failed"


class ToolFileError(ToolError):
    """A file of a tool is not there, cannot be read or written, or is where tools may not go."""

    code = "tool_file"


class ToolTimeoutError(ToolError):
    """A tool took longer than it may."""

    code = "tool_timeout"


class WebToolError(ToolError):
    """The web could not be searched, or a page not be read. `reason` says why, in a word."""

    status = 502
    code = "web_tool"

    def __init__(self, message: str, *, reason: str = "unavailable") -> None:
        super().__init__(message)
        self.reason = reason


class ToolServerError(ToolError):
    """An MCP server cannot be started or reached, has ended, or answers nonsense."""

    code = "tool_server_failed"


class ProxyError(TrioServeError):
    """The server that a page wants to reach through this one does not answer."""

    status = 502
    code = "proxy_failed"


class ProxyTimeoutError(ProxyError):
    """The target of `/cors-proxy` has not answered in time."""

    status = 504
    type = "timeout_error"


# -- a model of another server, behind this one


class UpstreamError(TrioServeError):
    """The server behind this one that has the model fails, or answers nonsense."""

    status = 502
    code = "upstream_failed"


class UpstreamTimeoutError(UpstreamError):
    """The server that has the model was silent for too long."""

    status = 504
    type = "timeout_error"


# -- a server that cannot answer now: status 503


class UnavailableError(TrioServeError):
    """The server is up but takes no requests. Try again, or elsewhere."""

    status = 503
    type = "unavailable_error"


class MemoryFullError(UnavailableError):
    """Requests hold as much memory as they may."""

    code = "memory_full"
    retry_after: float


class NoSummaryError(UnavailableError):
    """The model wrote no summary of a conversation."""

    code = "compaction_unavailable"


class StoreError(UnavailableError):
    """The store cannot be used: a full disk, a damaged file, or one that others hold."""

    code = "store_failed"
    public: ClassVar[str | None] = "The server cannot store anything now. Its log has the reason."


class StoreInUseError(StoreError):
    """Another server uses the store."""


class RecordDamagedError(StoreError):
    """The content of a record in the store is damaged."""

    public = None


class StoreFullError(UnavailableError):
    """The store holds as much as it may, and nothing of it can be deleted."""

    code = "store_full"


class RecordTooLargeError(StoreFullError):
    """The store takes no record, and no addition to one, of this size."""

    status = 413
    type = "invalid_request_error"
    code = "record_too_large"


class ModelLoadingError(UnavailableError):
    """The model is not loaded yet."""

    def __init__(self, message: str = "Loading model") -> None:
        super().__init__(message)


class ModelFailedError(UnavailableError):
    """The process of a model has died too often."""

    code = "model_failed"
    retry_after: float


class ModelProcessError(UnavailableError):
    """The process of a model ended before it had answered."""

    code = "model_process_ended"

    def __init__(
        self, message: str = "The process of the model ended before it had answered."
    ) -> None:
        super().__init__(message)


class UpstreamUnavailableError(UnavailableError):
    """The server behind this one that has the model cannot be reached, or takes no requests."""

    code = "upstream_unavailable"


class ServerSleepingError(UnavailableError):
    """The model is not in memory, and what was called does not load it."""

    def __init__(self, message: str = "The server sleeps: its model is not in memory") -> None:
        super().__init__(message)


class ServerClosingError(UnavailableError):
    """The server drains: what runs may finish, and nothing new is taken."""

    def __init__(self, message: str = "The server is shutting down") -> None:
        super().__init__(message)

    @classmethod
    def after(cls, timeout: float) -> ServerClosingError:
        """Make the error of requests that did not finish within a time in seconds."""
        return cls(f"The server shut down, {timeout:g} seconds after draining started.")


def raised_alone(error: Exception) -> Exception:
    """The exception in groups that hold no other; a group of several, or an exception, itself."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return error


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, and in the groups in it; of another exception, itself."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for one in error.exceptions:
        yield from errors_in(one)


def first_error(error: BaseException) -> BaseException:
    """Return the first error of `errors_in`."""
    return next(errors_in(error))
