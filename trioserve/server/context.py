"""`RequestContext`: what holds for a request whatever it asks for."""

from __future__ import annotations

import math

import attrs
import trio

from trioserve.errors import DeadlineExceededError
from trioserve.types import CancelReason


@attrs.frozen
class RequestContext:
    """Who asks, and until when. Made once, where the request comes in."""

    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    #: Whose rate limits it uses up: an API key, or an address; empty: nobody's.
    limited_as: str = attrs.field(default="", repr=False)
    #: When the request is cancelled, wherever it is (`trio.current_time`).
    deadline: float = attrs.field(default=math.inf, kw_only=True)
    #: Seconds for which the model stays in memory afterwards, idle; below 0: for ever. None: as the
    #: last request said, or else the configuration.
    keep_alive: float | None = attrs.field(default=None, kw_only=True)
    #: When it came in (`trio.current_time`). None: when its task is submitted.
    arrived: float | None = attrs.field(default=None, kw_only=True)
    #: Its id, and where it stands in the traces of the caller, as in the headers of these names.
    request_id: str = attrs.field(default="", kw_only=True)
    traceparent: str = attrs.field(default="", kw_only=True)
    tracestate: str = attrs.field(default="", kw_only=True)
    #: What the log gives as the reason when the caller's scope is cancelled.
    on_cancel: CancelReason = attrs.field(default=CancelReason.CALLER, kw_only=True)

    def check_time(self) -> None:
        """Refuse a request whose time is up. Raises DeadlineExceededError."""
        if self.deadline <= trio.current_time():
            raise DeadlineExceededError("The request's deadline has passed.")
