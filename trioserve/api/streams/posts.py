"""POSTs whose answer is a stream that can be resumed: they become a session, and its first reader.

A POST does so with ``X-Conversation-Id: ID``, a name that the client chooses, or with
``Prefer: respond-async``, for a browser's `EventSource`: the answer is 202 and a ``Location`` that
it can GET without headers or a body. With both, the stream has both names.

The session runs the same request once more, within the app. So limits, deadlines, the log and the
metrics treat it as they treat any request. Only its client is another: one that stays to the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import attrs
import trio
from quart import Quart, current_app, request
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.datastructures import Headers

from trioserve.api.base import errors, json_schema
from trioserve.api.base.body import look_into, parse_object
from trioserve.api.base.connection import WAITED_HEADER
from trioserve.api.base.forms import boundary_of, is_form, parse_form, with_field
from trioserve.api.base.intake import current_intake
from trioserve.api.base.request import (
    ID_HEADER,
    current_request,
    current_request_id,
    json_response,
)
from trioserve.api.sessions.session import Form, Send, Session
from trioserve.api.streams import reading
from trioserve.api.streams.names import ID, conversation_id
from trioserve.errors import InvalidRequestError, PayloadTooLargeError, TrioServeError

#: Seconds that a client waits for its 202, or for an error, unless it says ``wait=N``.
_WAIT = 0.25

#: Headers of the POST that end here, or that the request within the app has anew.
_OURS = frozenset(
    f"content-length expect prefer transfer-encoding {ID} {ID_HEADER} {WAITED_HEADER}".lower()
    .encode()
    .split()
)

#: Headers of the answer within the app that the answer to the POST has anew.
_THEIRS = frozenset({b"content-length", b"vary"})

_WAIT_SECONDS = re.compile(r'wait\s*=\s*"?([0-9]{1,9})"?', re.ASCII)


@attrs.frozen
class _Wanted:
    """What the headers of a POST ask for."""

    conversation: str | None
    wait: float | None  # seconds until the 202; none: the answer is to be the stream

    @classmethod
    def read(cls, headers: Headers) -> _Wanted | None:
        """Read them; None: there is no session to be. Raises InvalidRequestError: it is no id."""
        wanted = [
            each.partition(";")[0].strip().lower()
            for value in headers.getlist("Prefer")
            for each in value.split(",")
        ]
        is_async = "respond-async" in wanted
        if ID not in headers and not is_async:
            return None
        given = [_WAIT_SECONDS.fullmatch(each) for each in wanted]
        seconds = next((float(each[1]) for each in given if each is not None), _WAIT)
        return cls(
            conversation_id(headers[ID].encode("latin-1"), ID) if ID in headers else None,
            seconds if is_async else None,
        )


def install(app: Quart) -> None:
    """Take over the POSTs that are to become sessions. To be done after the checks of keys."""

    async def take_over() -> Response | None:
        takes: Any = getattr(app.view_functions.get(request.endpoint or ""), "takes", None)
        if request.method != "POST" or takes is None:
            return None
        default = _stream_by_default(takes)
        wanted = None if default is None else _Wanted.read(request.headers)
        if default is None or wanted is None or not current_intake().streams.is_open:
            return None
        body = await _stream_body(default=default, always=wanted.wait is not None)
        return None if body is None else await _begin(wanted, body)

    app.before_request(take_over)


@cache
def _stream_by_default(request_class: type) -> bool | None:
    """Whether such a request asks for a stream when it does not say; None: it never does."""
    schema = json_schema.of_fields(request_class).get("stream")
    return None if schema is None else bool(schema["default"])


async def _stream_body(*, default: bool, always: bool) -> bytes | None:
    """The body of the current request, if it asks for a stream, or if it `always` does.

    What is wrong with it is for the handler to say.
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
    current, sessions = current_request(), current_intake().streams
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    scope = {**current.scope, "headers": _headers(current.scope["headers"], len(body))}
    receive = _receive(body)
    current.body.clear()
    current.held.release()  # from now on, the request within the app holds it

    async def ask(send: Send) -> None:
        await app.asgi_http_class(app, scope)(receive, send)

    session = sessions.start(
        current.api_key, wanted.conversation, _form(), ask, secret=wanted.wait is not None
    )
    with trio.move_on_after(math.inf if wanted.wait is None else wanted.wait):
        await session.wait_answer()
    if session.is_stream or not session.is_answered:
        if wanted.wait is not None:
            return _accepted(session)
        return reading.respond(session, 0, headers=_passed_on(session))
    sessions.forget(session)
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


def _receive(body: bytes) -> Callable[[], Any]:
    """Make the ASGI ``receive`` of a client that sends a body, and stays."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await trio.sleep_forever()
        return messages.pop()

    return receive


def _form() -> Form:
    """How the route of the current request writes streams, and their errors."""
    shape, request_id = errors.shape_of(request.path), current_request_id()
    handler: Any = current_app.view_functions[request.endpoint or ""]

    def body(error: Exception) -> Any:
        known = error if isinstance(error, TrioServeError) else errors.unexpected(error)
        return shape.body(known, request_id)

    return Form(handler.streams, body, shape.event)


# -- the response to the POST


def _accepted(session: Session) -> Response:
    location = f"{request.root_path}/v1/stream/{session.names.secret}"
    response = json_response({"location": location}, status=202)
    response.headers["Location"] = location
    response.headers["Preference-Applied"] = "respond-async"
    return response


def _as_it_is(session: Session) -> Response:
    """Pass on an answer that is no stream. Raises what has kept it from being given."""
    if session.failure is not None:
        raise session.failure
    assert session.head is not None
    return Response(session.body, session.head.status, _passed_on(session))


def _passed_on(session: Session) -> Headers:
    assert session.head is not None
    return Headers(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in session.head.headers
        if name not in _THEIRS
    )
