"""A session as the response to a request that reads it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from quart_trio.wrappers import TrioResponse as Response
from werkzeug.datastructures import Headers

from trioserve.api.base import sse
from trioserve.api.base.request import current_request
from trioserve.api.sessions.ring import OffsetError
from trioserve.api.sessions.session import Session

#: Bytes of a stream that are sent at once.
_PIECE = 2**16


def respond(
    session: Session,
    offset: int,
    *,
    headers: Headers | None = None,
    first: bytes = b"",
    last: bytes = b"",
) -> Response:
    """Make the response that sends a stream from an offset on, until it ends.

    Args:
        session: what is sent.
        offset: where to begin; the ring has it.
        headers: of the response, other than usual.
        first: what is sent before.
        last: what is sent after the end.
    """
    current_request().resources.enter_context(session.reading())
    body = _follow(session, offset, first, last)
    headers = headers or Headers(sse.HEADERS)
    return Response(body, headers=headers, content_type=session.form.content_type)


async def _follow(
    session: Session, offset: int, first: bytes, last: bytes
) -> AsyncGenerator[bytes, None]:
    # An async generator, so no nursery or cancel scope may be open at a `yield`.
    ring = session.ring
    if first:
        yield first
    try:
        while not (ring.closed and offset == ring.end):
            if events := ring.read(offset, _PIECE):
                offset += len(events)
                yield events
            else:
                await session.wait_change()
    except OffsetError as error:  # it was slower than the stream, or the stream was stopped
        yield session.event_of(session.failure or error)
    if last:
        yield last
