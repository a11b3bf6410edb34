"""Streams that can be resumed: the POSTs that begin them; routes that read, find and stop them.

A POST becomes a session, and its first reader, with ``X-Conversation-Id: ID``, a name that the
client chooses, or with ``Prefer: respond-async``, for a browser's `EventSource`: the answer is 202
and a ``Location`` that it can GET without headers or a body. With both, the stream has both names.
The session runs the same request once more, within the app. So limits, deadlines, the log and the
metrics treat it as they treat any request. Only its client is another: one that stays to the end.

``?conv_id=ID`` names a stream as its client does; names belong to the API key that made them. A
browser's `EventSource` can only GET, without headers or a body: for it, ``/v1/stream/{id}`` has an
id that cannot be guessed, which stands in for the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import cache
from typing import Any, TypeAlias

import attrs
import trio
from quart import Blueprint, current_app, request
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.datastructures import Headers

from trioserve.api.base import access, errors, limits, readers, request_schemas, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.body import (
    boundary_of,
    is_form,
    look_into,
    parse_form,
    parse_object,
    read_body_as,
    with_field,
)
from trioserve.api.base.connection import WAITED_HEADER, current_request
from trioserve.api.base.fields import RequestBody, field
from trioserve.api.base.http import ID_HEADER, current_request_id, json_response
from trioserve.api.openapi import gives, takes
from trioserve.api.sessions import OffsetError, Send, StreamFormat, StreamSession
from trioserve.api.within import receive_of
from trioserve.errors import (
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    PermissionDeniedError,
)
from trioserve.whole_numbers import whole_number

# -- names


#: The header of a POST that names its stream.
ID = "X-Conversation-Id"

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


def respond(
    session: StreamSession,
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

#: Headers of the POST that are not forwarded to the request within the app, or are replaced.
_OURS = frozenset(
    f"content-length expect prefer transfer-encoding {ID} {ID_HEADER} {WAITED_HEADER}".lower()
    .encode()
    .split()
)

#: Headers of the answer within the app that the response to the POST sets itself.
_THEIRS = frozenset({b"content-length", b"vary"})

_WAIT_SECONDS = re.compile(r'wait\s*=\s*"?([0-9]{1,9})"?', re.ASCII)


@attrs.frozen
class _Wanted:
    """What the headers of a POST ask for."""

    conversation: str | None
    wait: float | None  # seconds until the 202; none: the answer is to be the stream

    @classmethod
    def read(cls, headers: Headers) -> _Wanted | None:
        """Read the headers; None: no session. Raises InvalidRequestError: the id is invalid."""
        wanted = [
            each.partition(";")[0].strip().lower()
            for value in headers.getlist("Prefer")
            for each in value.split(",")
        ]
        is_async = "respond-async" in wanted
        if ID not in headers and not is_async:
            return None
        given = [_WAIT_SECONDS.fullmatch(each) for each in wanted]
        seconds = next((float(each[1]) for each in given if each is not None), WAIT)
        return cls(
            conversation_id(headers[ID].encode("latin-1"), ID) if ID in headers else None,
            seconds if is_async else None,
        )


async def take_over() -> Response | None:
    """Start a session if the POST asks for one. Call this after the API key checks."""
    takes: Any = getattr(current_app.view_functions.get(request.endpoint or ""), "takes", None)
    if request.method != "POST" or takes is None:
        return None
    default = _stream_by_default(takes)
    wanted = None if default is None else _Wanted.read(request.headers)
    if default is None or wanted is None:
        return None
    current_app_state().streams.check_open()
    body = await _stream_body(default=default, always=wanted.wait is not None)
    return None if body is None else await _begin(wanted, body)


@cache
def _stream_by_default(request_class: type) -> bool | None:
    """The default of a request's ``stream`` field; None: it has no such field."""
    schema = request_schemas.of_fields(request_class).get("stream")
    return None if schema is None else bool(schema["default"])


async def _stream_body(*, default: bool, always: bool) -> bytes | None:
    """The body of the current request, if it asks for a stream, or with `always` is made to.

    The handler reports errors in the body.
    """

    content_type = request.headers.get("Content-Type", "")

    def look(body: bytes) -> bytes | None:
        if is_form(content_type):
            return look_at_form(body, boundary_of(content_type))
        fields = parse_object(body)
        stream = fields.get("stream")
        if stream is True or (stream is None and default):
            return body
        if not always or not (stream is None or stream is False):
            return None
        # Of two values, the last one counts.
        return body.rstrip()[:-1] + (b"," if fields else b"") + b'"stream":true}'

    def look_at_form(body: bytes, boundary: bytes) -> bytes | None:
        form = parse_form(body, boundary)
        if form.flag("stream"):
            return body
        may_be_asked = always and "stream" not in form.fields
        return with_field(body, boundary, "stream", "true") if may_be_asked else None

    try:
        return await look_into(look)
    except (InvalidRequestError, PayloadTooLargeError):
        return None


async def _begin(wanted: _Wanted, body: bytes) -> Response:
    """Begin a session, and make the response to the current request."""
    session = begin(wanted.conversation, asking(body), secret=wanted.wait is not None)
    wait = math.inf if wanted.wait is None else wanted.wait
    if (failed := await answer_of_failed(session, wait)) is not None:
        return failed
    if wanted.wait is not None:
        return _accepted(session)
    return respond(session, 0, headers=_passed_on(session))


#: Runs a request, whose answer goes to a function.
Ask: TypeAlias = Callable[[Send], Awaitable[None]]


def asking(body: bytes, **extra: Any) -> Ask:
    """Have a session run the current request, with a body and more in its scope."""
    current = current_request()
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    scope = {**current.scope, **extra, "headers": _headers(current.scope["headers"], len(body))}
    bodies = [body]  # what runs later does not keep it
    current.body.clear()

    async def ask(send: Send) -> None:
        with current.held.detach() as held:
            receive = receive_of(bodies.pop(), held.release)  # the request within the app holds it
            await app.asgi_http_class(app, scope)(receive, send)

    return ask


def begin(conversation: str | None, ask: Ask, *, secret: bool = False) -> StreamSession:
    """Begin a session for the client of the current request. Raises as `Sessions.start`."""
    sessions = current_app_state().streams
    return sessions.start(current_request().api_key, conversation, _form(), ask, secret=secret)


async def answer_of_failed(session: StreamSession, wait: float = WAIT) -> Response | None:
    """Wait for a stream to begin, or some seconds. Returns the answer of one that failed.

    Raises:
        TrioServeError: what prevented an answer.
    """
    with trio.move_on_after(wait):
        await session.wait_answer()
    if session.is_stream or not session.is_answered:
        return None
    current_app_state().streams.forget(session)
    return _as_it_is(session)


def _headers(given: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """The headers of the request within the app. Its time began when this one came."""
    waited = max(0.0, trio.current_time() - current_request().arrived)
    return [
        *(header for header in given if header[0].lower() not in _OURS),
        (b"content-length", b"%d" % length),
        (ID_HEADER.lower().encode(), current_request_id().encode()),
        (WAITED_HEADER.lower().encode(), f"{waited:.6f}".encode()),
    ]


def _form() -> StreamFormat:
    """How the route of the current request writes streams, and their errors."""
    handler: Any = current_app.view_functions[request.endpoint or ""]
    event = errors.shape_of(request.path).event
    return StreamFormat(handler.streams, errors.bodies_on(request.path), event)


# -- the response to the POST


def _accepted(session: StreamSession) -> Response:
    location = f"{request.root_path}/v1/stream/{session.names.secret}"
    response = json_response({"location": location}, status=202)
    response.headers["Location"] = location
    response.headers["Preference-Applied"] = "respond-async"
    return response


def _as_it_is(session: StreamSession) -> Response:
    """Forward an answer that is not a stream. Raises the error that prevented it."""
    if session.failure is not None:
        raise session.failure
    assert session.head is not None
    return Response(session.body, session.head.status, _passed_on(session))


def _passed_on(session: StreamSession) -> Headers:
    assert session.head is not None
    return Headers(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in session.head.headers
        if name not in _THEIRS
    )


# -- routes


blueprint = Blueprint("streams", __name__)

#: What an `EventSource` gets before and after the events. It reconnects after each response, this
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


@blueprint.get("/v1/stream")
@takes(
    None,
    query={
        "conv_id": "the id of the conversation, as its POST had it in X-Conversation-Id",
        "from": "the offset in bytes from which on to read; Last-Event-ID wins",
    },
)
@gives(str, "text/event-stream")
async def read() -> Response:
    """Read a stream from an offset on, and follow it until it ends."""
    session = _named()
    if session is None:
        raise NotFoundError("Stream not found or expired", param="conv_id")
    return _read(session, _offset(session))


@blueprint.delete("/v1/stream")
@takes(None, query={"conv_id": "the id of the conversation"})
@gives(None)
async def stop() -> Response:
    """Stop a stream, and forget it. Has no effect if there is none."""
    if (session := _named()) is not None:
        current_app_state().streams.stop(session, _STOPPED)
    return Response(status=204)


class _StreamOf(Answer):
    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: int
    completed_at: int | None


@blueprint.post("/v1/streams/lookup")
@takes(LookupRequest)
@gives(list[_StreamOf])
async def lookup() -> Response:
    """Describe the streams of the given conversations."""
    wanted = await read_body_as(LookupRequest.parse)
    found = current_app_state().streams.lookup(current_request().api_key, wanted.conversation_ids)
    return json_response(
        [
            _StreamOf(
                session.names.conversation or "",
                session.ring.closed,
                session.ring.end,
                session.started_at,
                session.completed_at,
            )
            for session in found
        ]
    )


def _named() -> StreamSession | None:
    given = request.args.get("conv_id")
    if given is None:
        raise InvalidRequestError.at("conv_id", "is required.")
    id_ = conversation_id(given.encode(), "conv_id")
    return current_app_state().streams.find(current_request().api_key, id_)


# -- by the secret name


@blueprint.get("/v1/stream/<id_>")
@takes(None, query={"from": "as for /v1/stream"})
@gives(str, "text/event-stream", may_be_empty=True)
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
@gives(None)
async def stop_secret(id_: str) -> Response:
    """Stop a stream, and forget it. Has no effect if there is none."""
    if (session := _secret(id_)) is not None:
        current_app_state().streams.stop(session, _STOPPED)
    return Response(status=204)


def _secret(id_: str) -> StreamSession | None:
    """Find a stream. Raises PermissionDeniedError if another API key started it."""
    session = current_app_state().streams.find_secret(id_)
    shown = access.shown_key(request.headers)
    if session is not None and session.names.key and shown not in ("", session.names.key):
        raise PermissionDeniedError("This stream belongs to another API key.")
    return session


# -- reading


def _read(session: StreamSession, offset: int, first: bytes = b"", last: bytes = b"") -> Response:
    if request.method == "HEAD":
        return Response(headers=sse.HEADERS, content_type=session.form.content_type)
    return respond(session, offset, first=first, last=last)


def _offset(session: StreamSession) -> int:
    """Where the request wants to begin. An id wins: an `EventSource` comes back with the same URL.

    Raises:
        InvalidRequestError: it is no number, no longer kept, or not there yet.
    """
    id_, ring = request.headers.get(_LAST_EVENT_ID), session.ring
    param, given = (_LAST_EVENT_ID, id_) if id_ else ("from", request.args.get("from") or "0")
    if (offset := whole_number(given)) is None:
        raise InvalidRequestError.at(param, "must be a number of bytes.")
    ring.check(offset, param)
    if id_ and not ring.is_boundary(offset):
        raise OffsetError(f"No event of the stream has the id {offset}.", param=param)
    return offset
