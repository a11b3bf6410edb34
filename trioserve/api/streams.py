"""Streams that can be resumed: the POSTs that begin them; routes that read, find and stop them.

A POST becomes a session, and its first reader, with ``X-Conversation-Id: ID``, a name that the
client chooses, or with ``Prefer: respond-async``, for a browser's `EventSource`: the answer is 202
and a ``Location`` that it can GET without headers or a body. With both, the stream has both names.
The session has the same handler answer, for a caller that stays to the end. So limits, deadlines,
the log and the metrics treat its request as they treat any.

``?conv_id=ID`` names a stream as its client does; names belong to the API key that made them. A
browser's `EventSource` can only GET, without headers or a body: for it, ``/v1/stream/{id}`` has an
id that cannot be guessed, which stands in for the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import attrs
import trio
from werkzeug.datastructures import Headers

from trioserve.api.base import errors, limits, readers, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import RequestBody, field
from trioserve.api.base.reply import Data, Pieces, Reply, json
from trioserve.api.base.routes import Query, Responder, Route, Routes
from trioserve.api.edge import access
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.sessions import ID, OffsetError, StreamSession
from trioserve.errors import InvalidRequestError, NotFoundError, PermissionDeniedError
from trioserve.whole_numbers import whole_number

# -- names


MAX_CHARS = 256


def conversation_id(given: bytes, param: str) -> str:
    """Read an id from a header or a parameter. Raises InvalidRequestError: it cannot be one."""
    try:
        id_ = given.decode()
    except UnicodeDecodeError:  # a header may be that, too
        id_ = given.decode("latin-1")
    if not 0 < len(id_) <= MAX_CHARS or not id_.isprintable():
        raise InvalidRequestError.at(
            param, f"must be 1 to {MAX_CHARS} characters, none of them a control character."
        )
    return id_


# -- reading


#: Bytes of a stream that are sent at once.
_PIECE = 2**16


def follow(
    caller: Caller, session: StreamSession, offset: int, *, first: bytes = b"", last: bytes = b""
) -> Reply:
    """Answer with a stream from an offset on, which its ring has, until it ends.

    `first` is sent before it, and `last` after it.
    """
    caller.enter(session.reading())
    return Pieces(
        pieces=_follow(session, offset, first, last),
        headers=dict(sse.HEADERS),
        content_type=session.content_type,
    )


async def _follow(
    session: StreamSession, offset: int, first: bytes, last: bytes
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


# -- POSTs


#: Seconds that a client waits for its 202 or for an error, without ``wait=N``.
WAIT = 0.25

_WAIT_SECONDS = re.compile(r'wait\s*=\s*"?([0-9]{1,9})"?', re.ASCII)


def _wanted(headers: Headers) -> tuple[str, float | None] | None:
    """Read the session that the headers of a POST ask for; None: they ask for none.

    Gives its name, which may be empty, and the seconds until the 202; None: the answer is a stream.
    """
    wanted = [
        each.partition(";")[0].strip().lower()
        for value in headers.getlist("Prefer")
        for each in value.split(",")
    ]
    is_async = "respond-async" in wanted
    if ID not in headers and not is_async:
        return None
    name = conversation_id(headers[ID].encode("latin-1"), ID) if ID in headers else ""
    given = [_WAIT_SECONDS.fullmatch(each) for each in wanted]
    seconds = next((float(each[1]) for each in given if each is not None), WAIT)
    return name, seconds if is_async else None


def resumable(route: Route, app: AppState, answer: Responder) -> Responder:
    """Have a route, which can stream, answer in a session if a POST with such a header asks."""

    async def begin(
        incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
    ) -> Reply:
        if (wanted := _wanted(caller.headers)) is None:
            return await answer(incoming, caller, values, **more)
        name, wait = wanted
        is_async = wait is not None
        app.streams.check_open()
        if not await _asks_for_stream(route, incoming, always=is_async):
            return await answer(incoming, caller, values, **more)

        async def ask(other: Caller) -> Reply:
            incoming.held = other.held
            return await answer(incoming, other, values, **more)

        session = app.streams.start(caller, name, route, ask, secret=is_async)
        seconds = math.inf if wait is None else wait
        if (failed := await reply_of_failed(app, session, seconds)) is not None:
            return failed
        if is_async:
            return _accepted(app, session)
        assert session.reply is not None
        return attrs.evolve(follow(caller, session, 0), headers=session.reply.headers)

    return begin


async def _asks_for_stream(route: Route, incoming: Incoming, *, always: bool) -> bool:
    """Check that a request asks for a stream; with `always`, have it ask for one."""
    if incoming.is_form:
        form = await incoming.form()
        asked, can_be_made = form.flag("stream"), "stream" not in form.fields
    else:
        fields = await incoming.fields()
        asked = route.asks_for_stream(fields)
        can_be_made = (given := fields.get("stream")) is None or given is False
    if asked or not (always and can_be_made):
        return bool(asked)
    incoming.ask_for_stream()
    return True


async def reply_of_failed(
    app: AppState, session: StreamSession, wait: float = WAIT
) -> Reply | None:
    """Wait for a stream to begin, or some seconds. Gives the reply in place of a stream."""
    with trio.move_on_after(wait):
        await session.answered.wait()
    if session.is_stream or not session.answered.is_set():
        return None
    app.streams.forget(session)
    if session.reply is not None:
        return session.reply
    assert session.failure is not None
    return errors.reply(session.failure, session.path)


def _accepted(app: AppState, session: StreamSession) -> Reply:
    location = f"{app.config.api_prefix}/v1/stream/{session.secret}"
    headers = {"Location": location, "Preference-Applied": "respond-async"}
    return attrs.evolve(json({"location": location}, status=202), headers=headers)


# -- routes


routes = Routes()

#: The text before and after the events of an `EventSource`. It reconnects after each response, this
#: many milliseconds later, unless the page closes it on the last event.
_FIRST = b"retry: 500\n\n"
_LAST = b"event: done\ndata: {}\n\n"

_STOPPED = "The stream was stopped."

_LAST_EVENT_ID = "Last-Event-ID"


@attrs.frozen(kw_only=True)
class LookupRequest(RequestBody):
    """``POST /v1/streams/lookup``."""

    conversation_ids: tuple[str, ...] = field(read=readers.strings_of(limits.MAX_LOOKUPS))


# -- by the name that the client has chosen


@routes.get("/v1/stream")
@takes(
    None,
    query={
        "conv_id": "the id of the conversation, as its POST had it in X-Conversation-Id",
        "from": "the offset in bytes from which on to read; Last-Event-ID wins",
    },
)
@gives(str, "text/event-stream")
async def read(query: Query, caller: Caller, app: AppState) -> Reply:
    """Read a stream from an offset on, and follow it until it ends."""
    session = _named(query, caller, app)
    if session is None:
        raise NotFoundError("Stream not found or expired", param="conv_id")
    return follow(caller, session, _offset(query, caller, session))


@routes.delete("/v1/stream")
@takes(None, query={"conv_id": "the id of the conversation"})
@gives(None)
async def stop(query: Query, caller: Caller, app: AppState) -> Reply:
    """Stop a stream, if it exists, and forget it."""
    if (session := _named(query, caller, app)) is not None:
        app.streams.stop(session, _STOPPED)
    return Data(status=204)


class _StreamOf(Answer):
    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: int
    completed_at: int | None


@routes.post("/v1/streams/lookup")
@takes(LookupRequest)
@gives(list[_StreamOf])
async def lookup(request: LookupRequest, caller: Caller, app: AppState) -> Reply:
    """Describe the streams of the given conversations."""
    found = app.streams.lookup(caller.api_key, request.conversation_ids)
    return json([_stream_of(each) for each in found])


def _stream_of(session: StreamSession) -> _StreamOf:
    id_, ring = session.conversation, session.ring
    return _StreamOf.like(session, conversation_id=id_, is_done=ring.closed, total_bytes=ring.end)


def _named(query: Query, caller: Caller, app: AppState) -> StreamSession | None:
    given = query.get("conv_id")
    if given is None:
        raise InvalidRequestError.at("conv_id", "is required.")
    id_ = conversation_id(given.encode(), "conv_id")
    return app.streams.find(caller.api_key, id_)


# -- by the secret name


@routes.get("/v1/stream/<id_>")
@takes(None, query={"from": "as for /v1/stream"})
@gives(str, "text/event-stream", may_be_empty=True)
async def read_secret(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Read a stream, as an `EventSource` does. The last event is called ``done``."""
    session = _secret(caller, app, id_)
    if session is None:
        raise NotFoundError("Stream not found or expired")
    offset = _offset(query, caller, session)
    if session.ring.closed and offset == session.ring.end:
        return Data(status=204)  # which stops an EventSource from coming back
    if session.content_type != sse.CONTENT_TYPE:
        return follow(caller, session, offset)
    return follow(caller, session, offset, first=_FIRST, last=_LAST)


@routes.delete("/v1/stream/<id_>")
@gives(None)
async def stop_secret(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Stop a stream, if it exists, and forget it."""
    if (session := _secret(caller, app, id_)) is not None:
        app.streams.stop(session, _STOPPED)
    return Data(status=204)


def _secret(caller: Caller, app: AppState, id_: str) -> StreamSession | None:
    """Find a stream. Raises PermissionDeniedError if another API key started it."""
    session = app.streams.find_secret(id_)
    shown = access.shown_key(caller.headers)
    if session is not None and session.key and shown not in ("", session.key):
        raise PermissionDeniedError("This stream belongs to another API key.")
    return session


def _offset(query: Query, caller: Caller, session: StreamSession) -> int:
    """Read the offset of the first byte. An id wins: an `EventSource` comes back with the same URL.

    Raises:
        InvalidRequestError: it is no number, no longer kept, or not there yet.
    """
    id_, ring = caller.headers.get(_LAST_EVENT_ID), session.ring
    param, given = (_LAST_EVENT_ID, id_) if id_ else ("from", query.get("from") or "0")
    if (offset := whole_number(given)) is None:
        raise InvalidRequestError.at(param, "must be a number of bytes.")
    ring.check(offset, param)
    if id_ and not ring.is_boundary(offset):
        raise OffsetError(f"No event of the stream has the id {offset}.", param=param)
    return offset
