"""Requests that wait for an `EventSource`.

A browser's `EventSource` can only GET, without headers or a body. So a chat posted with
``Prefer: respond-async`` is parked under an id that cannot be guessed, and answered with 202 and
its ``Location``. The GET on that location runs it and streams the answer; the request ends with
the connection. The id stands in for an API key.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

import attrs
import trio
from quart import current_app, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import sse
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.request import json_response
from trioserve.errors import NotFoundError, QueueFullError, TrioServeError
from trioserve.server import RequestContext
from trioserve.types import GenerationParams

#: Seconds that a request waits for its GET.
EXPIRES = 60.0

#: Requests that may wait at the same time, and ids that are remembered after the end.
MAX_PARKED = 256
MAX_REMEMBERED = 1024

_NAME = "trioserve.parked"


class ConflictError(TrioServeError):
    """The stream is being read by somebody else."""

    status = 409
    type = "invalid_request_error"


@attrs.frozen
class Parked:
    """A chat that nobody has come for yet."""

    request: ChatRequest
    params: GenerationParams
    context: RequestContext = attrs.field(factory=RequestContext)


class Lot:
    """The parked, running and ended requests of an app, by id."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._parked: OrderedDict[str, tuple[Parked, float]] = OrderedDict()
        self._running: dict[str, sse.Stop | None] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def park(self, request: Parked) -> str:
        """Keep a request; returns its id.

        Raises:
            QueueFullError: too many are waiting.
        """
        self._expire()
        if len(self._parked) >= MAX_PARKED:
            raise QueueFullError("Too many streams wait to be read.", retry_after=EXPIRES)
        id_ = secrets.token_urlsafe(24)
        self._parked[id_] = (request, self._clock() + EXPIRES)
        return id_

    def take(self, id_: str) -> Parked | None:
        """Take a request to run it; None when it has ended.

        Raises:
            NotFoundError: the id is unknown or has expired.
            ConflictError: it runs.
        """
        self._expire()
        if id_ in self._ended:
            return None
        if id_ in self._running:
            raise ConflictError("This stream is being read on another connection.")
        if id_ not in self._parked:
            raise NotFoundError("There is no such stream, or nobody came for it in time.")
        parked, _ = self._parked.pop(id_)
        self._running[id_] = None
        return parked

    def runs(self, id_: str, stop: sse.Stop) -> None:
        """Note what `cancel` has to stop."""
        self._running[id_] = stop

    def put_back(self, id_: str, request: Parked) -> None:
        """Undo `take`: the request has not run, and may be tried again."""
        del self._running[id_]
        self._parked[id_] = (request, self._clock() + EXPIRES)

    def end(self, id_: str) -> None:
        """Note that a request has ended, unless it was put back."""
        if id_ in self._parked:
            return
        self._running.pop(id_, None)
        self._ended[id_] = None
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def cancel(self, id_: str) -> None:
        """Drop a parked request, or stop a running one. One that has ended stays so.

        Raises:
            NotFoundError: the id is unknown.
        """
        self._expire()
        if self._parked.pop(id_, None) is not None:
            self.end(id_)
        elif stop := self._running.get(id_):
            stop.stop()
        elif id_ not in self._running and id_ not in self._ended:
            raise NotFoundError("There is no such stream.")

    def _expire(self) -> None:
        """Forget those that nobody came for. They stand in the order in which they came."""
        while self._parked:
            id_, (_, deadline) = next(iter(self._parked.items()))
            if deadline > self._clock():
                return
            del self._parked[id_]


def current_lot() -> Lot:
    """The lot of the app that handles the current request."""
    lot = current_app.extensions.setdefault(_NAME, Lot())
    assert isinstance(lot, Lot)
    return lot


def is_asked_for() -> bool:
    """Whether the current request is to be parked."""
    preferences = request.headers.get("Prefer", "").lower().split(",")
    return "respond-async" in (each.strip() for each in preferences)


def park(parked: Parked) -> Response:
    """Park a request, and say where."""
    location = f"{request.root_path}/v1/stream/{current_lot().park(parked)}"
    response = json_response({"location": location}, status=202)
    response.headers["Location"] = location
    response.headers["Preference-Applied"] = "respond-async"
    return response
