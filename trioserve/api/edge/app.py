"""`App`: from requests to handlers, and from their replies to responses.

Quart reads requests and finds their routes. A handler of a `Route` needs none of its contexts, so
that it is called directly; what a program adds to the app is Quart's to serve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import structlog
from quart.routing import QuartRule
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
from werkzeug.routing import BaseConverter

from trioserve.api.base import errors
from trioserve.api.base.body import Incoming
from trioserve.api.base.reply import Data, Reply, Stream
from trioserve.api.base.routes import Responder, Route
from trioserve.api.base.vendors import vendor_of
from trioserve.api.edge import access, tcp
from trioserve.api.edge.connection import ID_HEADER, PREFIX, Connection, Request
from trioserve.config import Config
from trioserve.errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    raised_alone,
)
from trioserve.fair_limiter import set_client

if TYPE_CHECKING:
    from trioserve.api.service import AppState


@attrs.define(eq=False)
class Outgoing:
    """A response: its head, and the pieces of its body."""

    status: int
    headers: Headers
    pieces: Iterable[bytes] | AsyncIterable[bytes]


@attrs.frozen
class _Served:
    """A route, what answers it, and what answers in its place a request that has a header."""

    route: Route
    answer: Responder
    asked: Mapping[str, Responder]


class _Rule(QuartRule):
    """A route that is found by its URL only. To build URLs from it, werkzeug would compile two
    functions for each route, which takes most of the time that an app takes to make.
    """

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        return _build_nothing


def _build_nothing(rule: _Rule, *_: object, **__: object) -> tuple[str, str]:
    raise NotImplementedError(f"{rule.rule}: URLs are not built")


class ResponseId(BaseConverter):
    """The id of a response in a path, which other names below ``/v1/responses`` do not match."""

    regex = "resp_[^/]+"


class App(QuartTrio):
    """The ASGI app of a state.

    Args:
        state: what answers.

    Attributes:
        state: the same, also in `extensions` by the name "trioserve".
        otherwise: answers where there is no route; none: with an error.
    """

    url_rule_class = _Rule  # type: ignore[assignment]
    asgi_http_class = Connection
    request_class = Request

    def __init__(self, state: AppState) -> None:
        super().__init__("trioserve", static_folder=None)
        tcp.install()
        self.state = self.extensions["trioserve"] = state
        self.config["RESPONSE_TIMEOUT"] = None  # a stream lasts as long as it lasts
        # Stopping waits for the inference thread, which a long step can hold.
        self.config["BACKGROUND_TASK_SHUTDOWN_TIMEOUT"] = 60.0
        self.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
        self.url_map.merge_slashes = False  # a path with two slashes is unknown, not redirected
        self.url_map.converters["response"] = ResponseId
        self.otherwise: Callable[[str, str], Awaitable[Reply]] | None = None
        self._sites, self._needs_key = access.Sites(state.config), False
        self._served: dict[str, _Served] = {}
        self._exact: dict[tuple[str, str], _Served] = {}
        #: Responders to requests with a header, by the route and the header.
        self._asked: defaultdict[str, dict[str, Responder]] = defaultdict(dict)
        self.after_serving(state.stop)

    def serve(
        self, route: Route, answer: Responder, asked: Mapping[str, Responder] | None = None
    ) -> None:
        """Add a route, and the function that answers it; or what does if there is a header."""
        name = f"{route.method} {route.path}"
        if route.header:
            self._asked[name][route.header] = answer
            return
        self._asked[name] |= asked or {}
        self._served[name] = served = _Served(route, answer, self._asked[name])
        if "<" not in route.path:
            self._exact[route.method, route.path] = served
        self.add_url_rule(route.path, name, _only_here, methods=[route.method])

    def configure(self, config: Config) -> None:
        """Set what a configuration says. To be done before requests come."""
        self.config["MAX_CONTENT_LENGTH"] = config.max_body_size
        self.config["BODY_TIMEOUT"] = None  # counted here
        self.config[PREFIX] = config.api_prefix
        self._sites = access.Sites(config)
        self._needs_key = config.has_api_keys

    async def respond(self, request: Request) -> Outgoing:
        """Answer a request. Errors have the form of its path."""
        caller = request.caller
        structlog.contextvars.bind_contextvars(request_id=caller.request_id)
        set_client(caller.address)
        try:
            outgoing = await self._answer(request)
        except Exception as error:
            known = caller.tally.error = self._known(error, caller.path)
            outgoing = await _outgoing(errors.reply(known, caller.path))
            if isinstance(error, MethodNotAllowed):
                outgoing.headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
        self._finish(request, outgoing)
        return outgoing

    async def _answer(self, request: Request) -> Outgoing:
        served, values, problem = self._find(request)
        if served is not None:
            request.route, request.is_quiet = served.route, served.route.is_quiet
        if request.method == "OPTIONS":  # a preflight request: browsers send no key
            request.is_quiet = True
            return await _outgoing(Data())  # 200, as in llama-server
        server = request.scope.get("server") or ("",)  # none: a Unix socket
        self._sites.check(request.path, request.headers, server[0])
        if self._needs_key:
            await access.check_key(self.state, request)
        if served is not None:
            answer = served.answer
            for header, other in served.asked.items():
                if header in request.headers:
                    answer = other
            reply = await answer(self._incoming(request), request.caller, values)
        elif isinstance(problem, NotFound) and self.otherwise is not None:
            request.is_quiet = True
            reply = await self.otherwise(request.method, request.path)
        elif problem is not None:
            raise problem
        else:
            return await _of_quart(await self.handle_request(request))
        request.reply, request.keep_alive = reply, reply.keep_alive
        request.is_ready = isinstance(reply, Stream) and reply.has_output()
        return await _outgoing(reply)

    def _find(
        self, request: Request
    ) -> tuple[_Served | None, Mapping[str, str], HTTPException | None]:
        """The route of a request and the parts of its path, or the error of the search."""
        method = "GET" if request.method == "HEAD" else request.method
        if (served := self._exact.get((method, request.path))) is not None:
            return served, {}, None
        try:
            rule, values = self.create_url_adapter(request).match(return_rule=True)  # type: ignore[union-attr]
        except HTTPException as error:
            served = self._exact.get((method, request.path.removesuffix("/")))
            return served, {}, None if served is not None else error
        return self._served.get(rule.endpoint), values, None

    def _incoming(self, request: Request) -> Incoming:
        config = self.state.config
        return Incoming(
            method=request.method,
            path=request.path,
            receive=partial(request.receive_whole, config.max_body_size, config.timeout),
            held=request.caller.held,
            query=request.args,
            content_type=request.headers.get("Content-Type", ""),
        )

    def _known(self, error: Exception, path: str) -> Exception:
        """Translate an error of werkzeug into a `TrioServeError`."""
        error = raised_alone(error)
        if not isinstance(error, HTTPException):
            return error
        if error.code == 404:
            return self.state.not_found(path)
        if error.code == 405:
            return MethodNotAllowedError("This route does not take this method.")
        translated = InvalidRequestError(error.description or error.name)
        translated.status = error.code or 400  # type: ignore[misc]
        return translated

    def _finish(self, request: Request, outgoing: Outgoing) -> None:
        """Count a response, and add to its head."""
        caller, route, headers = request.caller, request.route, outgoing.headers
        self.state.n_answers["" if route is None else route.path, outgoing.status] += 1
        vendor = vendor_of(request.path) if route is None else route.vendor
        headers[ID_HEADER] = caller.request_id
        if vendor.id_header is not None:
            headers[vendor.id_header] = caller.request_id
        headers.add("Vary", "Origin")
        headers.update(self._sites.headers_for(request.headers.get("Origin", ""), request.method))
        if left := caller.limits_left():
            headers.extend(vendor.rate_limits.write(left))


#: The statuses of answers that have no body.
_EMPTY = frozenset({204, 304})


async def _only_here(**values: str) -> NoReturn:
    raise NotImplementedError("`App` answers this route itself")


async def _outgoing(reply: Reply) -> Outgoing:
    pieces = await reply.write()
    headers = Headers(reply.headers)
    if reply.status not in _EMPTY:
        headers.setdefault("Content-Type", reply.content_type)
    if reply.status not in _EMPTY and not isinstance(pieces, AsyncIterable):
        headers.setdefault("Content-Length", str(sum(map(len, pieces))))
    return Outgoing(reply.status, headers, pieces)


async def _of_quart(response: Any) -> Outgoing:
    async def pieces() -> AsyncIterator[bytes]:
        async with response.response as parts:
            async for part in parts:
                yield part.encode() if isinstance(part, str) else part

    return Outgoing(response.status_code, response.headers, pieces())
