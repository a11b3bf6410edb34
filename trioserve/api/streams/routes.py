"""``/v1/stream`` and ``/v1/streams/lookup``: streams that are read again, found and stopped.

``?conv_id=ID`` names a stream as its client does; names belong to the API key that made them. A
browser's `EventSource` can only GET, without headers or a body: for it, ``/v1/stream/{id}`` has an
id that cannot be guessed, which stands in for the key.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import attrs
from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import auth, limits, sse
from trioserve.api.base.body import read_body_as
from trioserve.api.base.fields import field, json_type, strings, structure
from trioserve.api.base.intake import current_intake
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import current_request, json_response
from trioserve.api.sessions.ring import OffsetError
from trioserve.api.sessions.session import Session
from trioserve.api.streams import reading
from trioserve.api.streams.names import conversation_id
from trioserve.errors import InvalidRequestError, NotFoundError, PermissionDeniedError

blueprint = Blueprint("streams", __name__)

#: What an `EventSource` gets before and after the events. It connects again after any end of a
#: response, so many milliseconds later, unless the page closes it at the last event.
_FIRST = b"retry: 500\n\n"
_LAST = b"event: done\ndata: {}\n\n"

_OFFSET = re.compile(r"[0-9]{1,18}", re.ASCII)

_STOPPED = "The stream was stopped."

_LAST_EVENT_ID = "Last-Event-ID"


@json_type({"type": "array", "items": {"type": "string"}, "maxItems": limits.MAX_LOOKUPS})
def _ids(value: Any) -> tuple[str, ...]:
    given = strings(value)
    limits.check_count(len(given), limits.MAX_LOOKUPS, "strings")
    return given


@attrs.frozen(kw_only=True)
class LookupRequest:
    """``POST /v1/streams/lookup``."""

    conversation_ids: tuple[str, ...] = field(read=_ids)


# -- by the name that the client has chosen


@blueprint.get("/v1/stream")
@takes(
    None,
    query={
        "conv_id": "the id of the conversation, as its POST had it in X-Conversation-Id",
        "from": "the offset in bytes from which on to read; Last-Event-ID wins",
    },
)
async def read() -> Response:
    """Read a stream from an offset on, and follow it until it ends."""
    session = _named()
    if session is None:
        raise NotFoundError("Stream not found or expired", param="conv_id")
    return _read(session, _offset(session))


@blueprint.delete("/v1/stream")
@takes(None, query={"conv_id": "the id of the conversation"})
async def stop() -> Response:
    """Stop a stream, and forget it. Where there is none, nothing is to be done."""
    if (session := _named()) is not None:
        current_intake().streams.stop(session, _STOPPED)
    return Response(status=204)


@blueprint.post("/v1/streams/lookup")
@takes(LookupRequest)
async def lookup() -> Response:
    """Tell of the streams of some conversations, as far as there are any."""
    wanted = await read_body_as(partial(structure, LookupRequest))
    found = current_intake().streams.lookup(current_request().api_key, wanted.conversation_ids)
    return json_response(
        [
            {
                "conversation_id": session.names.conversation,
                "is_done": session.ring.closed,
                "total_bytes": session.ring.end,
                "started_at": session.started_at,
                "completed_at": session.completed_at,
            }
            for session in found
        ]
    )


def _named() -> Session | None:
    given = request.args.get("conv_id")
    if given is None:
        raise InvalidRequestError("'conv_id' is required.", param="conv_id")
    id_ = conversation_id(given.encode(), "conv_id")
    return current_intake().streams.find(current_request().api_key, id_)


# -- by the name that nobody guesses


@blueprint.get("/v1/stream/<id_>")
@takes(None, query={"from": "as for /v1/stream"})
async def read_secret(id_: str) -> Response:
    """Read a stream, as an `EventSource` does. The last event is called ``done``."""
    session = _secret(id_)
    if session is None:
        raise NotFoundError("Stream not found or expired")
    offset = _offset(session)
    if session.ring.closed and offset == session.ring.end:
        return Response(status=204)  # which stops an EventSource from coming back
    if session.form.content_type != sse.CONTENT_TYPE:
        return _read(session, offset)
    return _read(session, offset, _FIRST, _LAST)


@blueprint.delete("/v1/stream/<id_>")
async def stop_secret(id_: str) -> Response:
    """Stop a stream, and forget it. Where there is none, nothing is to be done."""
    if (session := _secret(id_)) is not None:
        current_intake().streams.stop(session, _STOPPED)
    return Response(status=204)


def _secret(id_: str) -> Session | None:
    """Find a stream. Raises PermissionDeniedError: another key is shown than made it."""
    session = current_intake().streams.find_secret(id_)
    shown = auth.key_in(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
    if session is not None and session.names.key and shown not in ("", session.names.key):
        raise PermissionDeniedError("This stream belongs to another API key.")
    return session


# -- reading


def _read(session: Session, offset: int, first: bytes = b"", last: bytes = b"") -> Response:
    if request.method == "HEAD":
        return Response(headers=sse.HEADERS, content_type=session.form.content_type)
    return reading.respond(session, offset, first=first, last=last)


def _offset(session: Session) -> int:
    """Where the request wants to begin. An id wins: an `EventSource` comes back with the same URL.

    Raises:
        InvalidRequestError: it is no number, no longer kept, or not there yet.
    """
    id_, ring = request.headers.get(_LAST_EVENT_ID), session.ring
    param, given = (_LAST_EVENT_ID, id_) if id_ else ("from", request.args.get("from") or "0")
    if not _OFFSET.fullmatch(given):
        raise InvalidRequestError(f"'{param}' must be a number of bytes.", param=param)
    offset = int(given)
    ring.check(offset, param)
    if id_ and not ring.is_boundary(offset):
        raise OffsetError(f"No event of the stream has the id {offset}.", param=param)
    return offset
