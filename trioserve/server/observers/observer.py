"""Events of a server: `Event`, the `Observer` protocol, and the log.

A server has a list of observers. It calls them on the event loop twice for each request, at its
start and at its end, and never for each token. The end event includes the times of admission and of
the first token. To add an event, add a class to `Event`, and call `emit` where the event happens.
Observers ignore unknown events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from time import monotonic
from typing import Literal, Protocol, TypeAlias

import attrs
import structlog
import trio

from trioserve.errors import TrioServeError, first_error
from trioserve.log import get_logger
from trioserve.server.context import RequestContext
from trioserve.server.stream import Stream
from trioserve.types import AnyTask, CancelReason, FinishReason, StepRecord, Timings

#: The end of a tool call: with a result; with an error as the result; refused; stopped by a user;
#: cancelled with its request.
ToolOutcome: TypeAlias = Literal["finished", "failed", "denied", "stopped", "cancelled"]

#: The operation of a request for speech.
SPEECH = "speech"

#: The ends of the work on a recording, or on a text that is spoken.
TRANSCRIPTION_ENDS = ("finished", "cancelled", "failed")


@attrs.frozen
class RequestInfo:
    """The properties of a request that are known at its start."""

    task_id: int
    model: str
    n_prompt: int  # tokens
    #: The operation's OpenTelemetry name: chat, text_completion, embeddings,
    #: rerank, or here speech.
    operation: str = attrs.field(default="text_completion", eq=False)
    task: AnyTask | None = attrs.field(default=None, eq=False, repr=False)
    context: RequestContext = attrs.field(factory=RequestContext, eq=False, repr=False)
    #: Decodes the prompt; None unless `Config.otel_content` is set.
    prompt_text: Callable[[], str] | None = attrs.field(default=None, eq=False, repr=False)
    #: The name of the API key; empty without one.
    key: str = attrs.field(default="", eq=False)


@attrs.frozen(kw_only=True)
class RequestEnd:
    """The end of a request: exactly one of `finish`, `cancelled` and `error` is set."""

    n_output: int  # tokens
    total_s: float  # since submission
    timings: Timings | None = None  # of requests that finished
    finish: FinishReason | None = None
    cancelled: CancelReason | None = None
    error: BaseException | None = None
    slot_id: int = -1  # of requests that finished
    #: True if it had a slot, and not only a place in the queue.
    had_slot: bool = True
    #: The output that was read; None unless `Config.otel_content` is set.
    text: str | None = attrs.field(default=None, repr=False)

    @property
    def error_type(self) -> str:
        """The type of the error, as in API responses."""
        return (self.error if isinstance(self.error, TrioServeError) else TrioServeError).type


@attrs.frozen
class RequestStarted:
    """An event: a request is about to be submitted to the engine."""

    request: RequestInfo


@attrs.frozen
class RequestRecord:
    """An event: a request has finished, failed or been cancelled. Sent once for each request."""

    request: RequestInfo
    end: RequestEnd


@attrs.define(eq=False)
class ToolRecord:
    """An event: a tool call has ended, as cancelled unless the block sets another outcome."""

    #: Empty if the tool does not exist, because the model may send any name.
    tool: str
    kind: str
    call_id: str = ""
    context: RequestContext = attrs.field(factory=RequestContext, repr=False)
    #: Seconds that the tool ran, without the wait for approval.
    seconds: float = 0.0
    outcome: ToolOutcome = "cancelled"
    #: True if the tool was run at all.
    ran: bool = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the tool's time during a block."""
        self.ran, began = True, monotonic()
        try:
            yield
        finally:
            self.seconds = monotonic() - began


@attrs.define(eq=False)
class TranscriptionRecord:
    """An event: the work on a recording has ended, as cancelled unless the block sets another end.

    The loaded model transcribes in windows, with one request for each. Whisper makes no requests,
    so this event is the only record of its work.
    """

    seconds: float  # length of the recording
    total_s: float = 0.0  # duration of the work
    is_finished: bool = False
    error: TrioServeError | None = None

    @property
    def end(self) -> str:
        """The end of the work: one of `TRANSCRIPTION_ENDS`."""
        if self.error is not None:
            return "failed"
        return "finished" if self.is_finished else "cancelled"


#: The events of observers. The engine's thread sends `StepRecord`, which only reaches functions
#: that subscribe to `Telemetry`.
Event: TypeAlias = RequestStarted | RequestRecord | ToolRecord | TranscriptionRecord | StepRecord


class Observer(Protocol):
    """Receives the events of a server."""

    def on_event(self, event: Event) -> None:
        """Handle an event. Must neither block nor raise."""


def emit(observers: Iterable[Observer], event: Event) -> None:
    """Send an event to observers."""
    for observer in observers:
        observer.on_event(event)


@contextmanager
def observed(
    observers: Iterable[Observer], request: RequestInfo, stream: Stream, on_cancel: CancelReason
) -> Iterator[None]:
    """Send the events of a request, which the block submits and reads.

    Args:
        on_cancel: the reason if the block is left early, or cancelled without the reason.
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
        del error  # break the cycle: its traceback refers to this frame
        emit(observers, RequestRecord(request, end))


#: The reasons of cancellation, as `trio.Cancelled` has them.
_REASONS: Mapping[str | None, CancelReason] = {each.value: each for each in CancelReason}


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
        told = None if error is None else getattr(first_error(error), "reason", None)
        cancelled = _REASONS.get(told, on_cancel)
    return RequestEnd(
        n_output=stream.mailbox.n_output,
        total_s=total_s,
        cancelled=cancelled,
        error=error if cancelled is None else None,
        had_slot=stream.mailbox.had_slot,
        text=text,
    )


def _is_cancellation(error: BaseException) -> bool:
    """True if an exception is a cancellation, or a group of several."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_cancellation, error.exceptions))
    return isinstance(error, trio.Cancelled | GeneratorExit)


@contextmanager
def observed_tool(observers: Iterable[Observer], record: ToolRecord) -> Iterator[None]:
    """Send the event of a tool call at the end of a block."""
    try:
        yield
    finally:
        emit(observers, record)


@contextmanager
def observed_recording(
    observers: Iterable[Observer], seconds: float
) -> Iterator[TranscriptionRecord]:
    """Send the event of a recording at the end of a block."""
    record, began = TranscriptionRecord(seconds), monotonic()
    try:
        yield record
    finally:
        record.total_s = monotonic() - began
        emit(observers, record)


class RequestLog:
    """The observer that logs a line when a task starts and one when it has ended, to debug.

    The second line has the token counts, the speeds, and exactly one of ``finish``, ``error`` and
    ``cancelled``.
    """

    @cached_property
    def _log(self) -> structlog.stdlib.BoundLogger:
        """Found once: when the first request comes, the log is configured."""
        return get_logger("trioserve.request").bind()

    def on_event(self, event: Event) -> None:
        """Log an event, as a warning if the server is to blame."""
        match event:
            case RequestStarted(request):
                self._log.debug(
                    "request started",
                    task=request.task_id,
                    model=request.model,
                    prompt_tokens=request.n_prompt,
                )
            case RequestRecord(request, end):
                self._tell_end(request, end)
            case ToolRecord():  # the log has no arguments and no result
                self._log.info(
                    "tool ended",
                    tool=event.tool or "unknown",
                    call=event.call_id,
                    end=event.outcome,
                    total_ms=round(event.seconds * 1e3, 1),
                )
            case TranscriptionRecord(seconds, total_s, _, error):
                facts = {"seconds": round(seconds, 1), "total_ms": round(total_s * 1e3, 1)}
                if error is not None:
                    self._log.warning("recording failed", **facts, error=error.message)
                else:
                    self._log.info("recording ended", **facts, end=event.end)

    def _tell_end(self, request: RequestInfo, end: RequestEnd) -> None:
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
            self._log.debug("request ended", **facts, finish=end.finish.value)
        elif end.cancelled is not None:
            self._log.debug("request ended", **facts, cancelled=end.cancelled.value)
        else:
            error = end.error
            message = error.message if isinstance(error, TrioServeError) else repr(error)
            if error is not None and error.__cause__ is not None:
                facts["cause"] = repr(error.__cause__)
            is_ours = not isinstance(error, TrioServeError) or error.status == 500
            log = self._log.warning if is_ours else self._log.debug
            log("request failed", **facts, error=message)
