"""The exceptions of trioserve: one tree, rooted in `TrioServeError`.

Each class maps to one HTTP status and one error ``type``, which a client sees in ``{"error":
{"code", "message", "type", "param"}}``. The names of the types are llama-server's and OpenAI's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self, TypedDict, Unpack


class _About(TypedDict, total=False):
    """The parts of an error that a class sets, and its subclasses inherit."""

    status: int
    type: str
    code: str
    public: str | None


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

    def __init_subclass__(cls, **about: Unpack[_About]) -> None:
        for name, value in about.items():
            setattr(cls, name, value)

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


class DeadlineExceededError(
    RequestEndedError, status=504, type="timeout_error", code="deadline_exceeded"
):
    """The deadline of the request has passed."""

    def __init__(
        self, message: str = "The request's deadline has passed.", *, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)


class StalledReaderError(
    RequestEndedError, status=408, type="timeout_error", code="stalled_reader"
):
    """The client stopped reading, and the limit for that passed."""


class StreamStoppedError(
    RequestEndedError, status=409, type="invalid_request_error", code="stream_stopped"
):
    """A DELETE has stopped the stream, or a newer one has the id of its conversation."""


class EngineError(TrioServeError, public="The inference engine failed."):
    """The engine could not continue this request, or any. The client does not learn why."""


class OutputError(EngineError, public=None):
    """The output of this request cannot be made: its grammar or its numbers do not allow it."""


class DecodeError(EngineError):
    """`llama_decode` failed, or what it computed are not numbers."""


class KVCacheFullError(DecodeError, code="kv_cache_full", public=None):
    """There are no free cells in the KV cache for this batch."""


class DecodeInterruptedError(DecodeError):
    """`llama_decode` was ended early, because its prompt was cancelled. Nothing has changed."""


class EncodeError(EngineError):
    """The projector could not make embeddings of an image or of sound."""


class EncodeInterruptedError(EncodeError):
    """An image or sound is no longer wanted, and its encoding was ended early."""


class TranscriberError(TrioServeError, public="The transcriber failed."):
    """The process that transcribes recordings has failed, or has ended."""


class BackendMismatchError(EngineError, public=None):
    """The installed llama.cpp lacks a function that trioserve calls."""


# -- requests that are wrong, and get a status between 400 and 499


class InvalidRequestError(TrioServeError, status=400, type="invalid_request_error"):
    """A field is missing, has the wrong type, or is out of range."""

    @classmethod
    def at(cls, param: str, problem: str) -> Self:
        """Make the error of a field: its name, and what is wrong with it."""
        return cls(f"'{param}' {problem}", param=param)


class UnknownFileError(InvalidRequestError, code="file_not_found"):
    """A request names an uploaded file that is not stored, or is another client's."""


class ContextLengthExceededError(
    InvalidRequestError, type="exceed_context_size_error", code="context_length_exceeded"
):
    """The prompt has more tokens than a sequence can hold."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> None:
        number = f"at least {n_prompt_tokens}" if at_least else f"{n_prompt_tokens}"
        super().__init__(
            f"The prompt has {number} tokens, which exceeds the available context size of {n_ctx} "
            "tokens, with room for at least one token of output.",
            param="prompt",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class NothingToSummarizeError(InvalidRequestError, code="compaction_nothing_to_summarize"):
    """A conversation that is to be compacted has no messages but rules."""


class InputTooLongError(ContextLengthExceededError):
    """A text to be embedded or ranked has more tokens than the model can take."""

    def __init__(self, n_tokens: int, limit: int, message: str, *, param: str) -> None:
        InvalidRequestError.__init__(self, message, param=param)
        self.n_prompt_tokens = n_tokens
        self.n_ctx = limit


class BodyTimeoutError(InvalidRequestError, status=408):
    """The client has not sent its body in time."""


class UnknownModelError(InvalidRequestError, status=404, code="model_not_found"):
    """There is no model of the name in the request."""


class AmbiguousModelError(InvalidRequestError, code="model_ambiguous"):
    """The name in the request is a part of the names of several models."""


class AdapterInUseError(InvalidRequestError, status=409, code="adapter_in_use"):
    """The LoRA adapter cannot be unloaded while a request runs or waits with it."""


class ModelNotLoadedError(InvalidRequestError, code="model_not_loaded"):
    """The model is not loaded, and the request or the configuration says not to load it."""


class NotSupportedError(TrioServeError, status=501, type="not_supported_error"):
    """The request asks for something that this server, or the loaded model, does not do."""


class UnsupportedFieldError(InvalidRequestError):
    """A field is known, but this version gives it no effect; so it is refused, not ignored."""


class ThreadsUnsupportedError(UnsupportedFieldError, code="thread_unsupported_request"):
    """A conversation should be kept by the server; the client sends all of it instead."""


class InvalidMediaError(InvalidRequestError, code="invalid_media"):
    """An image, a sound or a video cannot be read, or is larger than the limits allow.

    `index` says which one it is, where the error is raised for one of several.
    """

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


class PermissionDeniedError(TrioServeError, status=403, type="permission_error"):
    """It is from a page of another site, or asks for what its API key may not do, see or use."""


class AuthenticationError(TrioServeError, status=401, type="authentication_error"):
    """The API key is missing or wrong."""


class NotFoundError(TrioServeError, status=404, type="not_found_error"):
    """No such route, model or slot."""


class MethodNotAllowedError(TrioServeError, status=405, type="invalid_request_error"):
    """The route exists, but not for this HTTP method."""


class PayloadTooLargeError(TrioServeError, status=413, type="invalid_request_error"):
    """The body of the request is larger than the server takes."""


class TooManyRequestsError(TrioServeError, status=429, type="rate_limit_error"):
    """The client asks for more than it may have now."""

    retry_after: float


class QueueFullError(TooManyRequestsError, code="queue_full"):
    """More requests wait than the server allows."""


class RateLimitError(TooManyRequestsError, code="rate_limit_exceeded"):
    """The client has used up its requests or its tokens of this minute."""


class InsufficientQuotaError(
    TooManyRequestsError, type="insufficient_quota", code="insufficient_quota"
):
    """The API key has used up its tokens of this day, which ends at midnight UTC."""


# -- before a request: configuration, files, the operating system


class ConfigError(TrioServeError):
    """A flag, an environment variable or a configuration field has a value that cannot be used."""


class ModelLoadError(TrioServeError, status=503, type="unavailable_error"):
    """The model file is missing, is not a GGUF, is cut short, or does not fit in memory."""


class BridgeError(TrioServeError):
    """The descriptor that wakes the event loop could not be made."""


# -- models from the hub, and the cache that they are kept in


class HubError(TrioServeError, status=502):
    """A model cannot be downloaded, or the cache of downloaded models cannot be used."""


class HubUnavailableError(HubError, status=503, type="unavailable_error"):
    """The hub cannot be reached, or does not answer now."""


class HubNotFoundError(HubError, status=404, type="not_found_error"):
    """The hub, or the cache, has no such repository or file."""


class UnknownQuantError(HubNotFoundError):
    """The repository has no model with this quantization."""


class GatedModelError(HubError, status=403, type="permission_error"):
    """The hub gives the model only to those who have accepted its terms, and say who they are."""


class HashMismatchError(HubError):
    """A downloaded file does not have the hash that the hub tells."""


class DiskFullError(HubError, status=507, code="disk_full"):
    """There is no room for the model."""


# -- tools that cannot be run, or fail


class UnknownToolError(InvalidRequestError, status=404, code="tool_not_found"):
    """There is no such tool, or it cannot do what is asked, such as to stream its output."""


class UnknownToolCallError(NotFoundError, code="tool_call_not_found"):
    """There is no such call in this answer."""


class ToolCallDecidedError(InvalidRequestError, status=409, code="tool_call_decided"):
    """The call does not wait for approval, or not any more; or it has ended already."""


class ToolRuntimeError(TrioServeError, code="tool_runtime"):
    """The place where tools are to run does not exist, or it cannot be reached.

    The status is llama-server's.
    """


class ToolError(TrioServeError, code="tool_failed"):
    """A tool could not be run, or has failed. The model gets this as the result of its call."""


class ToolFileError(ToolError, code="tool_file"):
    """A file of a tool is not there, cannot be read or written, or is where tools may not go."""


class ToolTimeoutError(ToolError, code="tool_timeout"):
    """A tool took longer than it may."""


class WebToolError(ToolError, status=502, code="web_tool"):
    """The web could not be searched, or a page not be read. `reason` says why, in a word."""

    def __init__(self, message: str, *, reason: str = "unavailable") -> None:
        super().__init__(message)
        self.reason = reason


class ToolServerError(ToolError, code="tool_server_failed"):
    """An MCP server cannot be started or reached, has ended, or answers nonsense."""


class ProxyError(TrioServeError, status=502, code="proxy_failed"):
    """The server that a page wants to reach through this one does not answer."""


class ProxyTimeoutError(ProxyError, status=504, type="timeout_error"):
    """The target of `/cors-proxy` has not answered in time."""


# -- a model of another server, behind this one


class UpstreamError(TrioServeError, status=502, code="upstream_failed"):
    """The server behind this one that has the model fails, or answers nonsense."""


class UpstreamTimeoutError(UpstreamError, status=504, type="timeout_error"):
    """The server that has the model was silent for too long."""


# -- a server that cannot answer now: status 503


class UnavailableError(TrioServeError, status=503, type="unavailable_error"):
    """The server is up but takes no requests. Try again, or elsewhere."""


class MemoryFullError(UnavailableError, code="memory_full"):
    """Requests hold as much memory as they may."""

    retry_after: float


class NoSummaryError(UnavailableError, code="compaction_unavailable"):
    """The model wrote no summary of a conversation."""


class StoreError(
    UnavailableError,
    code="store_failed",
    public="The server cannot store anything now. Its log has the reason.",
):
    """The store cannot be used: a full disk, a damaged file, or one that others hold."""


class StoreInUseError(StoreError):
    """Another server uses the store."""


class RecordDamagedError(StoreError, public=None):
    """The content of a record in the store is damaged."""


class StoreFullError(UnavailableError, code="store_full"):
    """The store holds as much as it may, and nothing of it can be deleted."""


class RecordTooLargeError(
    StoreFullError, status=413, type="invalid_request_error", code="record_too_large"
):
    """The store takes no record, and no addition to one, of this size."""


class ModelLoadingError(UnavailableError):
    """The model is not loaded yet."""

    def __init__(self, message: str = "Loading model") -> None:
        super().__init__(message)


class ModelFailedError(UnavailableError, code="model_failed"):
    """The process of a model has died too often."""

    retry_after: float


class ModelProcessError(UnavailableError, code="model_process_ended"):
    """The process of a model ended before it had answered."""

    def __init__(
        self, message: str = "The process of the model ended before it had answered."
    ) -> None:
        super().__init__(message)


class UpstreamUnavailableError(UnavailableError, code="upstream_unavailable"):
    """The server behind this one that has the model cannot be reached, or takes no requests."""


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
