"""Forwarding: the current request to the child of its model, and what that answers to the client.

A client that goes away ends the request's nursery, wherever the request stands, and with it the
connection to the child.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Self
from urllib.parse import quote

import attrs
import trio
from quart import request
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.datastructures import Headers

from trioserve.api.base import errors, sse
from trioserve.api.base.connection import GRACE, WAITED_HEADER, Beat, Request, counted
from trioserve.api.base.errors import ErrorShape
from trioserve.api.base.request import (
    ID_HEADER,
    current_request,
    current_request_id,
    json_response,
)
from trioserve.api.router import asked
from trioserve.api.router.asked import Asked
from trioserve.api.router.places import Place, place_at
from trioserve.api.router.service import current_router
from trioserve.errors import DeadlineExceededError, ModelProcessError, TrioServeError
from trioserve.models.catalog import ModelEntry
from trioserve.router.fleet import Fleet
from trioserve.router.forward import Answer
from trioserve.router.states import Status
from trioserve.router.wire import ANSWER_HOP, REQUEST_HOP, STREAMS, NotTakenError, Outgoing

#: Bodies up to this length (bytes) are received before the answer begins: it can still become an
#: error until then.
_SHORT = 2**20


async def forward() -> Response:
    """Answer the current request as the child of its model does.

    Raises:
        TrioServeError: the model is unknown or cannot be loaded, or the request is wrong.
    """
    return await forward_to_model(await asked.read())


async def forward_to_model(wanted: Asked) -> Response:
    """Answer a request that was read as the child of its model does. Raises as `forward`."""
    router, resources = current_router(), current_request().resources
    fleet = router.fleet
    entry = fleet.catalog.find(wanted.model)
    if wanted.if_unloaded is not None and fleet.state(entry.name).value is Status.UNLOADED:
        return json_response(wanted.if_unloaded)
    resources.enter_context(counted(router.n_forwarded))
    try:
        response = await _respond(fleet, entry, wanted)
    except TrioServeError as error:
        router.metrics.answered(entry.name, error.status)
        raise
    router.metrics.answered(entry.name, response.status_code)
    return response


async def _respond(fleet: Fleet, entry: ModelEntry, wanted: Asked) -> Response:
    """Wait for the child, but only until it is time to say something to the client."""
    current = current_request()
    while True:
        place = await current.resources.enter_async_context(
            place_at(fleet, entry, wanted.say, autoload=wanted.autoload)
        )
        await _wait(place, wanted, sse.SOON if wanted.tells_place else wanted.ping_interval)
        if not place.decided:
            current.beat = Beat(wanted.ping_interval, place.beat)
            late = _answer_late(place, wanted, _Client.current())
            return Response(late, headers=sse.HEADERS, content_type=wanted.content_type)
        connection = await place.connection()
        with suppress(NotTakenError):
            return await respond(await connection.ask(outgoing(current, wanted.body)))


async def _wait(place: Place, wanted: Asked, patience: float) -> None:
    """Wait until the place is decided, for so many seconds at most.

    Raises:
        DeadlineExceededError: there is no time left.
    """
    if place.decided:
        return
    with trio.move_on_at(min(wanted.deadline, trio.current_time() + patience)):
        await place.wait()
    if not place.decided and trio.current_time() >= wanted.deadline:
        raise DeadlineExceededError("The deadline passed before the model was ready.")


def outgoing(current: Request, body: bytes) -> Outgoing:
    """Write a request for a child."""
    headers = [
        (name, value) for name, value in current.scope["headers"] if name.lower() not in REQUEST_HOP
    ]
    headers.append((ID_HEADER.encode(), current_request_id().encode()))
    waited = max(0.0, trio.current_time() - current.arrived)
    headers.append((WAITED_HEADER.encode(), f"{waited:.6f}".encode()))
    if (client := current.scope.get("client")) is not None:  # else a proxy has named it
        headers = [header for header in headers if header[0].lower() != b"x-forwarded-for"]
        headers.append((b"x-forwarded-for", client[0].encode()))
    query = current.query_string.decode("ascii", "replace")
    target = quote(current.path, safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")
    return Outgoing(current.method, target, headers, body)


async def respond(answer: Answer) -> Response:
    """Make the response to the current request that passes on what a child answers.

    Raises:
        ModelProcessError: the child ended first.
    """
    headers = Headers(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in answer.headers
        if name not in ANSWER_HOP and not name.startswith(b"access-control-")
    )
    length = int(answer.header(b"content-length") or 0)
    if not answer.ended and not 0 < length <= _SHORT:
        response = Response(_parts(answer, _Client.current()), answer.status, headers)
    else:
        response = Response(await answer.receive_all(), answer.status, headers)
    if length:
        response.headers["Content-Length"] = str(length)  # of a HEAD, too
    return response


@attrs.frozen
class _Client:
    """Whose request it is, for when its answer is sent: the current request is over by then."""

    request: Request
    shape: ErrorShape

    @classmethod
    def current(cls) -> Self:
        return cls(current_request(), errors.shape_of(request.path))

    def last_event(self, error: TrioServeError, n_before: int) -> bytes:
        """Write the error that ends a stream which had begun, in the form of its API."""
        return self.shape.event(self.shape.body(error, current_request_id()), n_before)


async def _parts(
    answer: Answer, client: _Client, *, begun: bool = False
) -> AsyncGenerator[bytes, None]:
    """Pass a body on as it comes. If the child ends before it does, a stream says so.

    With `begun`, the status of the response was sent before that of the answer was known.
    """
    n_events = 0
    try:
        if begun and answer.status != 200:
            yield client.shape.event(json.loads(await answer.receive_all()), 0)
            return
        while part := await answer.receive():
            n_events += part.count(b"\n\n")
            yield part
    except ModelProcessError as error:
        if answer.header(b"content-type").startswith(STREAMS):
            yield client.last_event(error, n_events)
        else:
            client.request.abort()  # which ends this task, too
            await trio.sleep(GRACE)


async def _answer_late(place: Place, wanted: Asked, client: _Client) -> AsyncGenerator[bytes, None]:
    """Tell where the request stands until it has its child, and then pass on what that answers."""
    # An async generator, so no nursery or cancel scope may be open at a `yield`.
    said = b""
    try:
        while not place.decided:
            if (comment := place.comment()) != said:
                yield comment
            said = comment
            await _wait(place, wanted, sse.LOOK_INTERVAL if wanted.tells_place else math.inf)
        connection = await place.connection()
        answer = await connection.ask(outgoing(client.request, wanted.body))
        async with aclosing(_parts(answer, client, begun=True)) as parts:
            async for part in parts:
                yield part
    except TrioServeError as error:
        yield client.last_event(error, 0)
