"""The context of a request and its outcome, and parameters made from fields by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import attrs

from trioserve.concurrency import deadline_scope
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import current_client, working_for
from trioserve.server.stream import Stream
from trioserve.types import (
    CancelReason,
    Finished,
    FinishReason,
    GenerationParams,
    SamplingParams,
)
from trioserve.types.params import changed

_T = TypeVar("_T", bound=attrs.AttrsInstance)


@attrs.define(eq=False)
class Tally:
    """The outcome of a request's tasks, for its line in the log."""

    model: str = ""  # that computed them
    n_prompt: int = 0  # tokens of the prompts
    n_cached: int = 0  # of these, found in the cache
    n_output: int = 0  # tokens that were generated
    #: The time that the first task waited for its slot; None: no task has ended.
    queue_ms: float | None = None
    ttft_ms: float = 0.0  # from its submission to its first token
    finish: FinishReason | None = None  # why the last one ended
    cancelled: CancelReason | None = None  # why the server ended one
    error: Any = None  # why the request failed

    def add(self, model: str, stream: Stream) -> None:
        """Add a task that has ended or is left."""
        mailbox = stream.mailbox
        self.n_output += mailbox.n_output
        self.cancelled = mailbox.cancel_reason
        self.add_end(model, mailbox.n_prompt, stream.finished)

    def add_end(self, model: str, n_prompt: int, finished: Finished | None) -> None:
        """Add the prompt of a task and, unless it is left, how it has ended."""
        self.model = model
        self.n_prompt += n_prompt
        if finished is None:
            return
        timings, self.finish = finished.timings, finished.reason
        self.n_cached += timings.cache_n
        if self.queue_ms is None:
            self.queue_ms, self.ttft_ms = timings.queue_ms, timings.queue_ms + timings.prompt_ms


@attrs.frozen
class RequestContext:
    """The client of a request and its deadline. Created once, when the request arrives."""

    #: The client for fair queueing. It may be an API key, so it is not part of the repr.
    client: str = attrs.field(default="", repr=False)
    #: The client for rate limits: an API key or an address; empty: no limit.
    limited_as: str = attrs.field(default="", repr=False)
    #: When the request is cancelled, in any state (`trio.current_time`).
    deadline: float = attrs.field(default=math.inf, kw_only=True)
    #: Seconds that the model stays in memory when idle after this request; below 0: for ever.
    #: None: as the last request set it, or else the configuration.
    keep_alive: float | None = attrs.field(default=None, kw_only=True)
    #: When the request arrived (`trio.current_time`). None: when its task is submitted.
    arrived: float | None = attrs.field(default=None, kw_only=True)
    #: The request's id, and the trace context of the caller, as in the headers of these names.
    request_id: str = attrs.field(default="", kw_only=True)
    traceparent: str = attrs.field(default="", kw_only=True)
    tracestate: str = attrs.field(default="", kw_only=True)
    #: The reason to log when the caller's scope is cancelled.
    on_cancel: CancelReason = attrs.field(default=CancelReason.CALLER, kw_only=True)
    #: It continues a request that was let in: neither draining nor a full queue refuses it.
    has_begun: bool = attrs.field(default=False, kw_only=True)
    #: Counts what its tasks come to, in this process.
    tally: Tally | None = attrs.field(default=None, kw_only=True, eq=False, repr=False)

    def preparing(self) -> AbstractContextManager[None]:
        """Prepare the request in a block, for its client and until its deadline.

        Raises:
            DeadlineExceededError: the deadline has passed, in the block or before it.
        """
        if self.deadline == math.inf and self.client in ("", current_client()):
            return nullcontext()
        return self._preparing()

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        with working_for(self.client), deadline_scope(self.deadline):
            yield


#: The context of a request without a client and a deadline.
ANYONE = RequestContext()


def take_fields(cls: type[_T], fields: dict[str, Any], base: _T | None = None) -> _T:
    """Copy `base`, and remove the class's fields from `fields` to set them."""
    changes = {name: fields.pop(name) for name in _names_of(cls) & fields.keys()}
    base = cls() if base is None else base
    return changed(base, changes) if changes else base


def take_params(fields: dict[str, Any], base: GenerationParams) -> GenerationParams:
    """Change fields of `GenerationParams` and of its `SamplingParams`. Uses all of `fields`.

    Raises:
        InvalidRequestError: a field is unknown, has the wrong type or is out of range.
    """
    if not fields:
        return base
    known = _names_of(SamplingParams) | _names_of(GenerationParams) - {"sampling"}
    refuse({name: fields[name] for name in fields.keys() - known})
    sampling = take_fields(SamplingParams, fields, base.sampling)
    if sampling is not base.sampling:
        fields["sampling"] = sampling
    return take_fields(GenerationParams, fields, base)


def refuse(fields: Mapping[str, Any]) -> None:
    """Reject unknown fields. Raises InvalidRequestError."""
    for name in sorted(fields):
        raise InvalidRequestError.at(name, "is not a parameter here.")


@cache
def _names_of(cls: type) -> frozenset[str]:
    return frozenset(attrs.fields_dict(cls))
