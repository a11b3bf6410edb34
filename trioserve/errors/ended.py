"""Requests that were running and ended badly, because of the engine or of others."""

from __future__ import annotations

from typing import ClassVar

from trioserve.errors.root import TrioServeError


class RequestEndedError(TrioServeError):
    """A request ended before it was finished, and not by its caller's own cancel scope."""


class DeadlineExceededError(RequestEndedError):
    """The request's deadline passed."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


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


class AbandonedError(RequestEndedError):
    """Work was given up because nobody waits for it any longer."""


class EngineError(TrioServeError):
    """The engine could not go on with this request, or with any. A client is not told why."""

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
