"""The ingress: an ASGI app that sends each request to a replica.

Serve's own proxy does not look into bodies, so this is where it is found out which model a request
is for. Keys, origins and sizes are checked here; all else that can be wrong with a request is for
the replica to say, which has the whole API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

import structlog

from trioserve.api.base import errors, sse
from trioserve.api.edge import access
from trioserve.api.edge.connection import ID_HEADER, choose_id
from trioserve.api.router.proxy import PassedStream, answer_headers
from trioserve.config import Config
from trioserve.errors import ModelProcessError, TrioServeError
from trioserve.ray.calls import IngressReply
from trioserve.ray.incoming import GoneError, Incoming, Receive, RouteTable, Scope, Send
from trioserve.ray.lifelines import Anchor
from trioserve.ray.routes import Routes
from trioserve.server.keys import Keys
from trioserve.server.limits.memory import MemoryBudget

_log = logging.getLogger("ray.serve")

#: Paths that a child lets clients use without a key, as its configuration says: it looks again.
_LOOKED_AT_AGAIN = ("/assets/", "/licenses.txt", "/sw.js", "/v1/stream/")


class Ingress:
    """The ASGI application of a replica's ingress.

    Args:
        config: the settings for clients that do not depend on the model.
        routes: has requests answered.
        anchor: shows replicas that this process lives.
    """

    def __init__(self, config: Config, routes: Routes, anchor: Anchor) -> None:
        self._config = config
        self._routes = routes
        self._anchor = anchor
        self._table = RouteTable()
        self._keys = Keys(config)
        self._memory = MemoryBudget.of(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, as ASGI has it. When cancelled, the replica cancels, too."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            offered = dict(scope["headers"]).get(ID_HEADER.lower().encode(), b"").decode("latin-1")
            request = Incoming.of(scope, choose_id(offered or None), self._table)
            with structlog.contextvars.bound_contextvars(request_id=request.id):
                await self._serve(request, receive, _Responder(request, self._config, send))

    def add_exception_handler(self, kind: type[Exception], handler: object) -> None:
        """Do nothing: Serve up to 2.49 says how its errors are to be answered, which we know."""

    async def _live(self, receive: Receive, send: Send) -> None:
        """Take part in ASGI's lifespan."""
        await receive()
        await asyncio.to_thread(self._keys.load)
        await self._anchor.begin()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._anchor.end()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, request: Incoming, receive: Receive, client: _Responder) -> None:
        """Answer a request. Errors have the form of its route."""
        with self._memory.hold() as held:
            try:
                if request.method == "OPTIONS":
                    await client.reply(IngressReply(headers=()))
                    return
                access.check(request.path, request.headers, request.server, self._config)
                held.belongs_to(await self._key_of(request))
                await request.read(receive, self._config, held)
                await client.reply(await self._routes.answer(request))
            except GoneError:
                return
            except TrioServeError as error:
                await client.refuse(error)
            except Exception as error:
                if client.has_begun:
                    raise  # which ends the connection: so the client sees that it is not whole
                await client.refuse(errors.unexpected(error))

    async def _key_of(self, request: Incoming) -> str:
        """The API key that a request shows. Raises AuthenticationError."""
        path = request.path
        if not self._keys.needed or path in access.PUBLIC or path.startswith(_LOOKED_AT_AGAIN):
            return ""
        shown = access.shown_key(request.headers)
        if self._keys.find(shown) is None:
            await asyncio.to_thread(self._keys.refresh)
            self._keys.need(shown)
        return shown


class _Responder:
    """Who gets the answer to a request."""

    def __init__(self, request: Incoming, config: Config, send: Send) -> None:
        self.has_begun = False
        self._request = request
        self._config = config
        self._send = send
        self._shape = errors.shape_of(request.path)

    async def reply(self, reply: IngressReply) -> None:
        """Send an answer, as it comes. Whatever happens, the call that it is from is ended.

        Raises:
            ModelProcessError: the replica has died in the middle of what is no stream.
        """
        with contextlib.ExitStack() as closing:
            if not reply.is_whole:
                closing.callback(reply.close)
            await self._begin(reply.status, reply.headers)
            await self._piece(reply.body, more=not reply.is_whole)
            if not reply.is_whole:
                await self._pass_on(reply)

    async def refuse(self, error: TrioServeError) -> None:
        """Send an error as the answer; or end one that has begun, which cannot be told then."""
        if self.has_begun:
            raise error
        body = sse.encode(self._shape.body(error, self._request.id)).encode()
        own = _headers(errors.headers_of(error))
        headers = [(b"content-type", b"application/json"), *own]
        await self.reply(IngressReply(status=self._shape.status(error), headers=headers, body=body))

    async def _pass_on(self, reply: IngressReply) -> None:
        passed = PassedStream(self._request.path, self._request.id)
        passed.n_events = reply.body.count(b"\n\n")
        try:
            async for part in reply.rest():
                passed.n_events += part.count(b"\n\n")
                await self._piece(part, more=True)
        except ModelProcessError as error:
            if not passed.can_end(reply.header(b"content-type")):
                raise
            await self._piece(passed.last_event(error), more=True)
        await self._piece(b"", more=False)

    async def _begin(self, status: int, given: Sequence[tuple[bytes, bytes]]) -> None:
        headers = list(answer_headers(given))
        headers.append((b"vary", b"Origin"))
        if self._request.headers.get(ID_HEADER) != self._request.id:  # else the proxy says it
            headers.append((ID_HEADER.lower().encode(), self._request.id.encode()))
        origin = self._request.headers.get("Origin", "")
        allowing = access.headers_for(origin, self._request.method, self._config)
        headers += _headers(allowing)
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _piece(self, body: bytes, *, more: bool) -> None:
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Write headers as ASGI has them."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
