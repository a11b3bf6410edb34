"""``/v1/stream/{id}``: where an `EventSource` reads the response that is pending for it.

A browser's `EventSource` can only GET, without headers or a body. So a chat posted with
``Prefer: respond-async`` is answered with 202 and a ``Location``. The GET on that location runs it
and streams the answer; the request ends with the connection. The id stands in for an API key.
"""

from __future__ import annotations

import attrs
from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import sse
from trioserve.api.base.request import current_request
from trioserve.api.base.service import current_responses, current_server
from trioserve.errors import MethodNotAllowedError, QueueFullError

blueprint = Blueprint("streams", __name__)

#: An event of its own after the last one, for the page to close on: an `EventSource` takes the
#: end of a response for a fault, and connects again.
LAST = b"event: done\ndata: {}\n\n"


class _EndsWithEvent:
    """An encoder that adds `LAST`."""

    def __init__(self, encoder: sse.Encoder) -> None:
        self.encode = encoder.encode
        self._end = encoder.end

    def end(self) -> bytes:
        """Write the end, and the event."""
        return self._end() + LAST


@blueprint.get("/v1/stream/<id_>")
async def read(id_: str) -> Response:
    """Run a pending chat, and stream its answer."""
    if request.method == "HEAD":
        raise MethodNotAllowedError("Only GET runs a pending request.")
    current_server()  # or there is none yet, and it stays pending
    responses = current_responses()
    start = responses.take(id_)
    if start is None:
        return Response(status=204)  # which stops an EventSource from coming back
    current_request().resources.callback(responses.end, id_)
    try:
        events = await start()
    except QueueFullError:
        responses.put_back(id_)
        raise
    responses.started(id_, events.streams)
    on_error = events.on_error
    events = attrs.evolve(
        events,
        encoder=_EndsWithEvent(events.encoder),
        on_error=lambda error: on_error(error) + LAST,
    )
    return await sse.respond(current_request(), events)


@blueprint.delete("/v1/stream/<id_>")
async def cancel(id_: str) -> Response:
    """Drop a pending chat, or stop it where it runs."""
    current_responses().cancel(id_)
    return Response(status=204)
