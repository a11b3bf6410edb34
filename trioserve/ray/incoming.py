"""A request to an ingress, and the answer to the client, in plain ASGI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlencode

import attrs
from werkzeug.datastructures import Headers

from trioserve.api.base import vendors
from trioserve.api.base.body import SHORT_BODY, Incoming
from trioserve.api.base.reply import Reply
from trioserve.api.base.routes import Route
from trioserve.api.base.vendors import Fields
from trioserve.api.edge.connection import ID_HEADER, choose_id
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

_T = TypeVar("_T")


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


@attrs.define(kw_only=True, eq=False)
class IngressRequest(Incoming):
    """A request to an ingress. `given` has the fields of its body, once they were read."""

    route: Route
    headers: Headers
    raw_headers: Sequence[tuple[bytes, bytes]]
    server: str  # the address that received it
    client: str | None
    id: str
    arrived: float  # by the clock of the event loop
    given: Fields = attrs.field(factory=dict)

    @classmethod
    def of(
        cls,
        scope: Scope,
        route_at: Callable[[str, str], Route],
        receive: Callable[[], Awaitable[bytes]],
        held: MemoryReservation,
    ) -> IngressRequest:
        """Make it from an ASGI scope, the routes, and what receives its body."""
        raw = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
        headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in raw)
        method, path = scope["method"], _without_prefix(scope["path"], scope.get("root_path", ""))
        query = scope.get("query_string", b"").decode("ascii", "replace")
        return cls(
            method=method,
            path=path,
            receive=receive,
            held=held,
            query=dict(reversed(parse_qsl(query, keep_blank_values=True))),  # the first of a name
            content_type=headers.get("Content-Type", ""),
            query_string=query,
            keeps_data=True,
            route=route_at(method, path),
            headers=headers,
            raw_headers=raw,
            server=(scope.get("server") or ("",))[0] or "",
            client=(scope.get("client") or (None,))[0],
            id=choose_id(headers.get(ID_HEADER)),
            arrived=asyncio.get_running_loop().time(),
        )

    async def aside(self, work: Callable[[], _T]) -> _T:
        """Do work on the body, in a thread if it is long."""
        return work() if self.size <= SHORT_BODY else await asyncio.to_thread(work)

    @property
    def model(self) -> str | None:
        """The name of the model that it gives. Raises InvalidRequestError: it is no name."""
        return self.route.model_in(self.given, self.query)

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
        target = proxy.target_of(path or self.path, _with(self.query_string, query))
        return (self.method, target, headers, (self.data or b"") if body is None else body)


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


async def received(receive: Receive, config: Config, held: MemoryReservation) -> bytes:
    """Receive a body.

    Raises:
        PayloadTooLargeError: it is too large.
        MemoryFullError: requests hold too much memory as it is.
        BodyTimeoutError: it does not come.
        GoneError: the client has disconnected.
    """
    whole, more = bytearray(), True
    while more:
        try:
            async with asyncio.timeout(config.timeout):
                message = await receive()
        except TimeoutError:
            raise BodyTimeoutError(
                f"No more of the body came for {config.timeout:g} seconds."
            ) from None
        if message["type"] == "http.disconnect":
            raise GoneError("The client has gone.")
        part, more = message.get("body", b""), message.get("more_body", False)
        held.grow(len(part))
        whole += part
        if len(whole) > config.max_body_size:
            raise PayloadTooLargeError(
                f"The body is larger than max_body_size, which is {config.max_body_size} bytes."
            )
    return bytes(whole)
