"""What a server reports of its work: an `Event`, an `Observer` that takes it, and the log.

A server has a list of observers. They are called on the event loop: twice for a request, when it
starts and when it has ended, and never for a token. The times between, of admission and of the
first token, come with the end. A new event is a class here that belongs to `Event`, and a call of
`emit` where it happens; observers ignore events that they do not know.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Literal, Protocol, TypeAlias

import attrs
import structlog
import trio

from trioserve.errors import TrioServeError
from trioserve.renamed import renamed_names
from trioserve.server.context import RequestContext
from trioserve.server.stream import Stream
from trioserve.types import (
    CancelReason,
    EmbeddingTask,
    FinishReason,
    StepRecord,
    Task,
    Timings,
)

_log = structlog.stdlib.get_logger("trioserve.request")

#: How a call of a tool may end: it has a result; the result is an error; it was not allowed; a
#: person has stopped it; its request was cancelled.
ToolOutcome: TypeAlias = Literal["finished", "failed", "denied", "stopped", "cancelled"]

#: How the work on a recording may end.
TRANSCRIPTION_ENDS = ("finished", "cancelled", "failed")


@attrs.frozen
class RequestInfo:
    """What is known of a request from the start."""

    task_id: int
    model: str
    n_prompt: int  # tokens
    #: In the words of OpenTelemetry: chat, text_completion, embeddings or rerank.
    operation: str = attrs.field(default="text_completion", eq=False)
    task: Task | EmbeddingTask | None = attrs.field(default=None, eq=False, repr=False)
    context: RequestContext = attrs.field(factory=RequestContext, eq=False, repr=False)
    #: Writes the prompt as the model reads it; none unless `Config.otel_content` says so.
    prompt_text: Callable[[], str] | None = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen(kw_only=True)
class RequestEnd:
    """How a request ended: exactly one of `finish`, `cancelled` and `error` is set."""

    n_output: int  # tokens
    total_s: float  # from submission on
    timings: Timings | None = None  # of requests that finished
    finish: FinishReason | None = None
    cancelled: CancelReason | None = None
    error: BaseException | None = None
    slot_id: int = -1  # of requests that finished
    #: The output as far as it was read; none unless `Config.otel_content` says so.
    text: str | None = attrs.field(default=None, repr=False)

    @property
    def error_type(self) -> str:
        """The type of the error, as the API gives it."""
        return (self.error if isinstance(self.error, TrioServeError) else TrioServeError).type


@attrs.frozen
class RequestStarted:
    """An event: a request is about to be submitted to the engine."""

    request: RequestInfo


@attrs.frozen
class RequestRecord:
    """An event: a request has finished, failed or been cancelled. Each has exactly one."""

    request: RequestInfo
    end: RequestEnd


@attrs.define(eq=False)
class ToolRecord:
    """An event: a call of a tool has ended. If nothing else is noted, it was cancelled."""

    #: Empty if the server has no such tool: a model may call it anything.
    tool: str
    kind: str
    call_id: str = ""
    context: RequestContext = attrs.field(factory=RequestContext, repr=False)
    #: For how long the tool ran, without the time in which a person was asked.
    seconds: float = 0.0
    outcome: ToolOutcome = "cancelled"
    #: Whether the tool was run at all.
    ran: bool = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure a block: the tool runs."""
        self.ran, began = True, monotonic()
        try:
            yield
        finally:
            self.seconds = monotonic() - began


@attrs.define(eq=False)
class TranscriptionRecord:
    """An event: the work on a recording has ended. If nothing else is noted, it was cancelled.

    A model that hears transcribes window by window, and each is a request of its own. Whisper makes
    no requests, so without this nothing would be known of its work.
    """

    seconds: float  # that the recording lasts
    total_s: float = 0.0  # that the work took
    is_finished: bool = False
    error: TrioServeError | None = None

    @property
    def end(self) -> str:
        """How it has ended: one of `TRANSCRIPTION_ENDS`."""
        if self.error is not None:
            return "failed"
        return "finished" if self.is_finished else "cancelled"


#: What observers receive. A `StepRecord` comes from the engine's thread, and only reaches functions
#: that subscribe to `Telemetry`.
Event: TypeAlias = RequestStarted | RequestRecord | ToolRecord | TranscriptionRecord | StepRecord


class Observer(Protocol):
    """Something that follows what a server does."""

    def on_event(self, event: Event) -> None:
        """Take note of an event. Neither blocks nor raises."""
        _call_old_method(self, event)  # of a subclass that has none of this name


def emit(observers: Iterable[Observer], event: Event) -> None:
    """Tell observers of an event."""
    for observer in observers:
        try:
            on_event = observer.on_event
        except AttributeError:
            _call_old_method(observer, event)
        else:
            on_event(event)


def _call_old_method(observer: Any, event: Event) -> None:
    """Tell an observer that has a method for each event, as all had before `on_event`."""
    warnings.warn(
        f"{type(observer).__name__} has methods such as request_ended; observers now have "
        "on_event(event)",
        DeprecationWarning,
        stacklevel=3,
    )
    match event:
        case RequestStarted():
            observer.request_started(event.request)
        case RequestRecord():
            observer.request_ended(event.request, event.end)
        case ToolRecord() if hasattr(observer, "tool_ended"):
            observer.tool_ended(event)
        case TranscriptionRecord() if hasattr(observer, "recording_ended"):
            observer.recording_ended(event)


@contextmanager
def observed(
    observers: Iterable[Observer], request: RequestInfo, stream: Stream, on_cancel: CancelReason
) -> Iterator[None]:
    """Tell the observers of a request, which the block submits and reads.

    Args:
        observers: receive the events, in this order.
        request: what is known from the start.
        stream: of the request; says how it ended.
        on_cancel: the reason if the block is cancelled or left early.
    """
    began = monotonic()
    emit(observers, RequestStarted(request))
    error: BaseException | None = None
    try:
        yield
    except BaseException as exc:
        error = exc
        raise
    finally:
        end = _end(stream, error, on_cancel, monotonic() - began)
        del error  # its traceback refers to this frame
        emit(observers, RequestRecord(request, end))


def _end(
    stream: Stream, error: BaseException | None, on_cancel: CancelReason, total_s: float
) -> RequestEnd:
    text = None if stream.texts is None else "".join(stream.texts)
    if stream.finished is not None:
        timings, reason = stream.finished.timings, stream.finished.reason
        return RequestEnd(
            n_output=timings.predicted_n,
            total_s=total_s,
            timings=timings,
            finish=reason,
            slot_id=stream.finished.slot_id,
            text=text,
        )
    cancelled = stream.mailbox.cancel_reason
    if cancelled is None and (error is None or _is_cancellation(error)):
        cancelled = on_cancel
    return RequestEnd(
        n_output=stream.n_tokens,
        total_s=total_s,
        cancelled=cancelled,
        error=error if cancelled is None else None,
        text=text,
    )


def _is_cancellation(error: BaseException) -> bool:
    """Whether a block was left because it was cancelled: several tasks may have been, at once."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_cancellation, error.exceptions))
    return isinstance(error, trio.Cancelled | GeneratorExit)


@contextmanager
def observed_tool(observers: Iterable[Observer], record: ToolRecord) -> Iterator[None]:
    """Tell the observers of a call of a tool, when the block has ended."""
    try:
        yield
    finally:
        emit(observers, record)


@contextmanager
def observed_recording(
    observers: Iterable[Observer], seconds: float
) -> Iterator[TranscriptionRecord]:
    """Tell the observers of the work on a recording, when the block has ended."""
    record, began = TranscriptionRecord(seconds), monotonic()
    try:
        yield record
    finally:
        record.total_s = monotonic() - began
        emit(observers, record)


class RequestLog:
    """The observer that writes the log: a line when a request starts and one when it has ended.

    The second line has the token counts, the speeds, and how the request ended: ``finish`` or
    ``error`` or ``cancelled``, exactly one of them.
    """

    def on_event(self, event: Event) -> None:
        """Write a line, as a warning of what has failed."""
        match event:
            case RequestStarted(request):
                _log.info(
                    "request started",
                    task=request.task_id,
                    model=request.model,
                    prompt_tokens=request.n_prompt,
                )
            case RequestRecord(request, end):
                _log_end(request, end)
            case ToolRecord():  # without the arguments and the result
                _log.info(
                    "tool ended",
                    tool=event.tool or "unknown",
                    call=event.call_id,
                    end=event.outcome,
                    total_ms=round(event.seconds * 1e3, 1),
                )
            case TranscriptionRecord(seconds, total_s, _, error):
                facts = {"seconds": round(seconds, 1), "total_ms": round(total_s * 1e3, 1)}
                if error is not None:
                    _log.warning("recording failed", **facts, error=error.message)
                else:
                    _log.info("recording ended", **facts, end=event.end)


def _log_end(request: RequestInfo, end: RequestEnd) -> None:
    facts: dict[str, object] = {
        "task": request.task_id,
        "model": request.model,
        "prompt_tokens": request.n_prompt,
        "completion_tokens": end.n_output,
    }
    if (timings := end.timings) is not None:
        facts["cached_tokens"] = timings.cache_n
        for name, n, ms in (
            ("prefill_tokens_per_s", timings.prompt_n, timings.prompt_ms),
            ("decode_tokens_per_s", timings.predicted_n - 1, timings.predicted_ms),
        ):
            facts[name] = round(n / ms * 1e3, 1) if ms > 0 and n > 0 else 0.0
        facts["queue_ms"] = round(timings.queue_ms, 1)
        facts["ttft_ms"] = round(timings.queue_ms + timings.prompt_ms, 1)
    facts["total_ms"] = round(end.total_s * 1e3, 1)
    if end.finish is not None:
        _log.info("request ended", **facts, finish=end.finish.value)
    elif end.cancelled is not None:
        _log.info("request ended", **facts, cancelled=end.cancelled.value)
    else:
        error = end.error
        message = error.message if isinstance(error, TrioServeError) else repr(error)
        if error is not None and error.__cause__ is not None:
            facts["cause"] = repr(error.__cause__)
        _log.warning("request failed", **facts, error=message)


__getattr__ = renamed_names(
    __name__, {"ToolWork": "ToolRecord", "RecordingWork": "TranscriptionRecord"}
)
