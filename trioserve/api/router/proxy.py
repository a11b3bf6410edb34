"""What a proxy does to a request and its answer on their way, whatever event loop it has.

Both that of many models on one machine (`trioserve.api.router`) and that of an application of Ray
(`trioserve.ray`) do these things, each with its own sockets.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from trioserve.api.base import errors, sse
from trioserve.api.base.body import Form, Incoming, boundary_of, is_form, parse_form, parse_json
from trioserve.api.base.vendors import Fields
from trioserve.api.edge.connection import ID_HEADER, WAITED_HEADER
from trioserve.errors import ModelProcessError, TrioServeError
from trioserve.router.forward import Headers

#: Headers of a request that end at a proxy: they are about the connection, or it has obeyed them.
_REQUEST_HOP = frozenset(
    b"connection content-length expect host keep-alive origin proxy-authorization te trailer "
    b"transfer-encoding upgrade x-request-id x-request-waited x-trioserve-stored".split()
)

#: Headers of an answer that a proxy does not pass on: it writes them itself.
_ANSWER_HOP = frozenset(
    b"connection date keep-alive server transfer-encoding vary x-request-id".split()
)


# -- requests


async def fields_of(incoming: Incoming) -> Fields:
    """Read a body, as far as it is an object, or a form with files.

    Raises:
        InvalidRequestError: it is neither JSON nor a form.
        TrioServeError: as `Incoming.read`.
    """
    if not incoming.is_read:
        return await incoming.read(partial(_parse, incoming.content_type))
    return _fields_in(await incoming.form()) if incoming.is_form else await incoming.fields()


def _parse(content_type: str, body: bytes) -> Fields:
    if not body:
        return {}
    if is_form(content_type):
        return _fields_in(parse_form(body, boundary_of(content_type)))
    value = parse_json(body)
    return value if isinstance(value, dict) else {}


def _fields_in(form: Form) -> Fields:
    """The fields of a form, with the values that tell how to forward it."""
    fields: dict[str, Any] = {name: values[-1] for name, values in form.fields.items()}
    with suppress(KeyError, ValueError):  # it is not there, or the child will refuse it
        fields["timeout"] = float(fields["timeout"])
    return {**fields, "stream": form.flag("stream")}


def target_of(path: str, query: str) -> str:
    """Write the path and the query as the first line of a request has them."""
    return quote(path, safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")


def request_headers(
    headers: Iterable[tuple[bytes, bytes]], *, request_id: str, waited: float, client: str | None
) -> list[tuple[bytes, bytes]]:
    """The headers of a request for a child: those that came, and what is known here.

    Names are in lower case. `waited` is how long ago it came, in seconds. Without a `client`, a
    proxy has named it.
    """
    without = _REQUEST_HOP | {b"x-forwarded-for"} if client else _REQUEST_HOP
    passed = [each for each in headers if each[0] not in without]
    passed.append((ID_HEADER.lower().encode(), request_id.encode()))
    passed.append((WAITED_HEADER.lower().encode(), f"{max(0.0, waited):.6f}".encode()))
    if client:
        passed.append((b"x-forwarded-for", client.encode()))
    return passed


# -- answers


def head_of(headers: Headers) -> tuple[dict[str, str], str]:
    """The headers of an answer that are passed on, and its content type; empty: it has none."""
    passed = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name not in _ANSWER_HOP and not name.startswith(b"access-control-")
    }
    return passed, passed.pop("content-type", "")


class PassedStream:
    """A stream that is passed on, and the error that may end it.

    Args:
        path: that of the request.
        request_id: its id.
        begun: what was passed on of it.
    """

    def __init__(self, path: str, request_id: str, begun: bytes = b"") -> None:
        self._shape = errors.shape_of(path)
        self._request_id = request_id
        self._n_events = begun.count(b"\n\n")

    async def pieces(
        self, receive: Callable[[], Awaitable[bytes]], content_type: str
    ) -> AsyncGenerator[bytes, None]:
        """Pass on what is received, until that is nothing.

        If the process of the model ends early, a stream ends with an error, and an answer of
        another type breaks off with a ModelProcessError.
        """
        try:
            while part := await receive():
                self._n_events += part.count(b"\n\n")
                yield part
        except ModelProcessError as error:
            if not content_type.startswith((sse.CONTENT_TYPE, self._shape.content_type)):
                raise
            yield self.last_event(error)

    def last_event(self, error: TrioServeError) -> bytes:
        """Write an error as the last event."""
        return self.write(self._shape.body(error, self._request_id))

    def write(self, body: Mapping[str, Any]) -> bytes:
        """Write the body of an error as the last event."""
        return self._shape.event(body, self._n_events)
