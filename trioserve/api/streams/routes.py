"""``/v1/stream/{id}``: where an `EventSource` reads what was parked for it."""

from __future__ import annotations

from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import errors, sse
from trioserve.api.base.request import current_request
from trioserve.api.base.service import current_server
from trioserve.api.openai.chat import open_chat
from trioserve.api.streams.parked import current_lot
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
    """Run a parked request, and stream its answer."""
    if request.method == "HEAD":
        raise MethodNotAllowedError("Only GET runs a parked request.")
    lot = current_lot()
    server = current_server()
    parked = lot.take(id_)
    if parked is None:
        return Response(status=204)  # which stops an EventSource from coming back
    current_request().resources.callback(lot.end, id_)
    try:
        feed, events, pings = await open_chat(server, parked.request, parked.params, parked.context)
    except QueueFullError:
        lot.put_back(id_, parked)
        raise
    stop = sse.Stop(feed)
    lot.runs(id_, stop)
    return await sse.respond(
        current_request(),
        stop.feed,
        _EndsWithEvent(events),
        lambda error: errors.last_event(error) + LAST,
        pings,
    )


@blueprint.delete("/v1/stream/<id_>")
async def cancel(id_: str) -> Response:
    """Drop a parked request, or stop it where it runs."""
    current_lot().cancel(id_)
    return Response(status=204)
