"""A request to an ingress, and the answer to the client, in plain ASGI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode

import attrs
from werkzeug.datastructures import Headers

from trioserve.api.base import vendors
from trioserve.api.base.reply import Reply
from trioserve.api.base.routes import Route
from trioserve.api.base.vendors import Fields
from trioserve.api.router import proxy
from trioserve.config import Config
from trioserve.errors import BodyTimeoutError, PayloadTooLargeError, TrioServeError
from trioserve.server.limits.memory import MemoryReservation

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

#: A request on its way: method, target, headers, body.
Sent: TypeAlias = tuple[str, str, Sequence[tuple[bytes, bytes]], bytes]

#: Bodies up to this length (bytes) are parsed on the event loop.
_SHORT_BODY = 32 * 1024


async def _nothing() -> Reply:
    raise NotImplementedError("the ingress answers itself, or a replica does")


_UNKNOWN = Route("GET", "", _nothing)


class RouteTable:
    """The routes of replicas, by method and path."""

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str], Route] = {}
        self._varying: list[tuple[re.Pattern[str], Route]] = []
        for each in vendors.known_routes():
            self._routes[each.method, each.path] = each
            if "<" in each.path:
                self._varying.append((re.compile(re.sub("<[^>]*>", "[^/]+", each.path)), each))

    def at(self, method: str, path: str) -> Route:
        """The route of a request; of an unknown one, a route that takes nothing."""
        varying = (one for rule, one in self._varying if rule.fullmatch(path))
        found = self._routes.get((method, path))
        return found or next((one for one in varying if one.method == method), _UNKNOWN)


class GoneError(TrioServeError):
    """The client disconnected before it had sent its body."""


@attrs.define(kw_only=True)
class Incoming:
    """A request. `body` and its `fields` are there once `read` has returned."""

    method: str
    path: str
    route: Route
    query: str
    headers: Headers
    raw_headers: Sequence[tuple[bytes, bytes]]
    server: str  # the address that received it
    client: str | None
    id: str
    arrived: float  # by the clock of the event loop
    body: bytes = b""
    fields: Fields = attrs.field(factory=dict)

    @classmethod
    def of(cls, scope: Scope, request_id: str, table: RouteTable) -> Incoming:
        """Make it from an ASGI scope."""
        raw = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
        path = _without_prefix(scope["path"], scope.get("root_path", ""))
        return cls(
            method=scope["method"],
            path=path,
            route=table.at(scope["method"], path),
            query=scope.get("query_string", b"").decode("ascii", "replace"),
            headers=Headers(
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in raw
            ),
            raw_headers=raw,
            server=(scope.get("server") or ("",))[0] or "",
            client=(scope.get("client") or (None,))[0],
            id=request_id,
            arrived=asyncio.get_running_loop().time(),
        )

    @property
    def args(self) -> Mapping[str, str]:
        """The fields of the query; of those with the same name, the first."""
        pairs = parse_qsl(self.query, keep_blank_values=True)
        return dict(reversed(pairs))

    async def read(self, receive: Receive, config: Config, held: MemoryReservation) -> None:
        """Receive the body, and parse it.

        Raises:
            PayloadTooLargeError: it is too large.
            MemoryFullError: requests hold too much memory as it is.
            InvalidRequestError: it is not JSON, where it should be.
            BodyTimeoutError: it does not come.
        """
        try:
            async with asyncio.timeout(config.timeout):
                self.body = await self._receive(receive, config, held)
        except TimeoutError:
            raise BodyTimeoutError(
                f"The body did not arrive within {config.timeout:g} seconds."
            ) from None
        if len(self.body) <= _SHORT_BODY:
            self.fields = self._parse()
        else:
            self.fields = await asyncio.to_thread(self._parse)

    async def _receive(self, receive: Receive, config: Config, held: MemoryReservation) -> bytes:
        parts: list[bytes] = []
        n_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise GoneError("The client has gone.")
            part = message.get("body", b"")
            n_bytes += len(part)
            if n_bytes > config.max_body_size:
                raise PayloadTooLargeError(
                    f"The body is larger than max_body_size, which is {config.max_body_size} bytes."
                )
            held.grow(2 * len(part))  # with the decoded data
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _parse(self) -> Fields:
        return proxy.fields_of(self.body, self.headers.get("Content-Type", ""))

    @property
    def model(self) -> str | None:
        """The name of the model that it gives. Raises InvalidRequestError: it is no name."""
        return self.route.model_in(self.fields, self.args)

    def sent(self, *, path: str | None = None, body: bytes | None = None, **query: Any) -> Sent:
        """Write it for a child, possibly on another path or with another body.

        What is given of `query` is set, and None leaves it out.
        """
        headers = proxy.request_headers(
            self.raw_headers,
            request_id=self.id,
            waited=asyncio.get_running_loop().time() - self.arrived,
            client=self.client,
        )
        target = proxy.target_of(path or self.path, _with(self.query, query))
        return (self.method, target, headers, self.body if body is None else body)


def _without_prefix(path: str, prefix: str) -> str:
    """Leave out the prefix that the application is reached under."""
    rest = path.removeprefix(prefix.rstrip("/")) if prefix else path
    return rest if rest.startswith("/") else f"/{rest}"


def _with(query: str, values: Mapping[str, Any]) -> str:
    """Set values in a query; those that are None are left out."""
    if not values:
        return query
    pairs = [each for each in parse_qsl(query, keep_blank_values=True) if each[0] not in values]
    pairs += [(name, str(value)) for name, value in values.items() if value is not None]
    return urlencode(pairs)
