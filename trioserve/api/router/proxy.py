"""What a proxy does to a request and its answer on their way, whatever event loop it has.

Both that of many models on one machine (`trioserve.api.router`) and that of an application of Ray
(`trioserve.ray`) do these things, each with its own sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from trioserve.api.base import errors
from trioserve.api.base.body import Form, boundary_of, is_form, parse_form, parse_json
from trioserve.api.base.vendors import Fields
from trioserve.api.edge.connection import ID_HEADER, WAITED_HEADER
from trioserve.errors import TrioServeError
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


def fields_of(body: bytes, content_type: str) -> Fields:
    """Parse a body, as far as it is an object, or a form with files.

    Raises:
        InvalidRequestError: it is neither JSON nor a form.
    """
    if not body:
        return {}
    if not is_form(content_type):
        value = parse_json(body)
        return value if isinstance(value, dict) else {}
    return fields_in(parse_form(body, boundary_of(content_type)))


def fields_in(form: Form) -> Fields:
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
) -> Headers:
    """The headers of a request for a child: those that came, and what is known here.

    `waited` is how long ago it came, in seconds. Without a `client`, a proxy has named it.
    """
    without = _REQUEST_HOP | {b"x-forwarded-for"} if client else _REQUEST_HOP
    passed = [(name, value) for name, value in headers if name.lower() not in without]
    passed.append((ID_HEADER.lower().encode(), request_id.encode()))
    passed.append((WAITED_HEADER.lower().encode(), f"{max(0.0, waited):.6f}".encode()))
    if client:
        passed.append((b"x-forwarded-for", client.encode()))
    return passed


# -- answers


def answer_headers(headers: Headers) -> Headers:
    """The headers of an answer that are passed on."""
    return [
        (name, value)
        for name, value in headers
        if name not in _ANSWER_HOP and not name.startswith(b"access-control-")
    ]


class PassedStream:
    """A stream that is passed on, and the error that may end it after `n_events` of its events.

    Args:
        path: that of the request.
        request_id: its id.
    """

    def __init__(self, path: str, request_id: str) -> None:
        self._shape = errors.shape_of(path)
        self._request_id = request_id
        self.n_events = 0

    def can_end(self, content_type: bytes) -> bool:
        """Whether an answer of this type can tell in its body that it has failed."""
        return content_type.startswith((b"text/event-stream", self._shape.content_type.encode()))

    def last_event(self, error: TrioServeError) -> bytes:
        """Write an error as the last event."""
        return self.write(self._shape.body(error, self._request_id))

    def write(self, body: Mapping[str, Any]) -> bytes:
        """Write the body of an error as the last event."""
        return self._shape.event(body, self.n_events)
