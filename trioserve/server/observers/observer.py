"""`Observer`: what is told when a request starts and when it has ended.

A server has a list of them. They are called on the event loop, once for each of the two events and
never for a token. The times between, of admission and of the first token, come with the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import attrs
import trio

from trioserve.errors import TrioServeError
from trioserve.server.context import RequestContext
from trioserve.server.stream import Stream
from trioserve.types import CancelReason, EmbeddingTask, FinishReason, Task, Timings

#: How the work on a recording may end.
ENDS = ("finished", "cancelled", "failed")

#: How a call may end: it has a result; the result is an error; it was not allowed; a person has
#: stopped it; nobody waits for it any more.
ToolOutcome: TypeAlias = Literal["finished", "failed", "denied", "stopped", "cancelled"]
TOOL_OUTCOMES: tuple[ToolOutcome, ...] = ("finished", "failed", "denied", "stopped", "cancelled")


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


class Observer(Protocol):
    """Something that follows requests. Its methods neither block nor raise."""

    def request_started(self, request: RequestInfo) -> None:
        """Note a request that is about to be submitted to the engine."""

    def request_ended(self, request: RequestInfo, end: RequestEnd) -> None:
        """Note a request that has finished, failed or been cancelled. Called exactly once."""


@contextmanager
def observed(
    observers: Iterable[Observer], request: RequestInfo, stream: Stream, on_cancel: CancelReason
) -> Iterator[None]:
    """Tell the observers of a request, which the block submits and reads.

    Args:
        observers: who is told, in this order.
        request: what is known from the start.
        stream: of the request; says how it ended.
        on_cancel: the reason if the block is cancelled or left early.
    """
    began = monotonic()
    for observer in observers:
        observer.request_started(request)
    error: BaseException | None = None
    try:
        yield
    except BaseException as exc:
        error = exc
        raise
    finally:
        end = _end(stream, error, on_cancel, monotonic() - began)
        del error  # its traceback refers to this frame
        for observer in observers:
            observer.request_ended(request, end)


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


@attrs.define(eq=False)
class RecordingWork:
    """The work on one recording. If nothing else is noted, it was cancelled."""

    seconds: float  # that the recording lasts
    total_s: float = 0.0  # that the work took
    is_finished: bool = False
    error: TrioServeError | None = None

    @property
    def end(self) -> str:
        """How it has ended: one of `ENDS`."""
        if self.error is not None:
            return "failed"
        return "finished" if self.is_finished else "cancelled"


@runtime_checkable
class RecordingObserver(Protocol):
    """An `Observer` that follows recordings, too."""

    def recording_ended(self, work: RecordingWork) -> None:
        """Note a recording that was transcribed, or was not. Called exactly once."""


@contextmanager
def observed_recording(observers: Iterable[object], seconds: float) -> Iterator[RecordingWork]:
    """Tell those observers of a recording that follow recordings, when the block has ended."""
    work, began = RecordingWork(seconds), monotonic()
    try:
        yield work
    finally:
        work.total_s = monotonic() - began
        for observer in observers:
            if isinstance(observer, RecordingObserver):
                observer.recording_ended(work)


@attrs.define(eq=False)
class ToolWork:
    """The work on one call. If nothing else is noted, it was cancelled."""

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


@runtime_checkable
class ToolObserver(Protocol):
    """An `Observer` that follows calls of tools, too."""

    def tool_ended(self, work: ToolWork) -> None:
        """Note a call that has ended. Called exactly once."""


@contextmanager
def observed_tool(observers: Iterable[object], work: ToolWork) -> Iterator[ToolWork]:
    """Tell those observers of a call that follow them, when the block has ended."""
    try:
        yield work
    finally:
        for observer in observers:
            if isinstance(observer, ToolObserver):
                observer.tool_ended(work)
