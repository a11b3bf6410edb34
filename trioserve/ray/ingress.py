"""The ingress: an ASGI app that sends each request to a replica.

Serve's own proxy does not look into bodies, so this is where it is found out which model a request
is for. Keys, origins and sizes are checked here; all else that can be wrong with a request is for
the replica to say, which has the whole API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable
from contextlib import closing
from functools import partial

import structlog

from trioserve.api.base import errors
from trioserve.api.base.reply import Data, Reply
from trioserve.api.edge import access
from trioserve.api.edge.connection import ID_HEADER
from trioserve.api.router import proxy
from trioserve.api.router.proxy import PassedStream
from trioserve.config import Config
from trioserve.ray.calls import ReplicaReply
from trioserve.ray.incoming import (
    GoneError,
    IngressRequest,
    Receive,
    RouteTable,
    Scope,
    Send,
    received,
)
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
        self._route_at = RouteTable().at
        self._keys = Keys(config)
        self._memory = MemoryBudget.of(config)
        self._sites = access.Sites(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, as ASGI has it. When cancelled, the replica cancels, too."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            with self._memory.hold() as held:
                body = partial(received, receive, self._config, held)
                request = IngressRequest.of(scope, self._route_at, body, held)
                with structlog.contextvars.bound_contextvars(request_id=request.id):
                    await self._serve(request, _Responder(request, self._sites, send))

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

    async def _serve(self, request: IngressRequest, client: _Responder) -> None:
        """Answer a request. Errors have the form of its route."""
        try:
            if request.method == "OPTIONS":
                await client.reply(Data())
                return
            self._sites.check(request.path, request.headers, request.server)
            request.held.belongs_to(await self._key_of(request))
            request.given = await proxy.fields_of(request)
            await client.reply(await self._routes.answer(request))
        except GoneError:
            return
        except Exception as error:
            if client.has_begun:
                raise  # which ends the connection: so the client sees that it is not whole
            await client.reply(errors.reply(error, request.path))

    async def _key_of(self, request: IngressRequest) -> str:
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

    def __init__(self, request: IngressRequest, sites: access.Sites, send: Send) -> None:
        self.has_begun = False
        self._request = request
        self._sites = sites
        self._send = send

    async def reply(self, reply: Reply) -> None:
        """Send an answer, as it comes. Whatever happens, the call that it is from is ended.

        Raises:
            ModelProcessError: the replica has died in the middle of what is no stream.
        """
        if not isinstance(reply, ReplicaReply) or reply.is_whole:
            pieces = await reply.write()
            assert not isinstance(pieces, AsyncIterable)
            body = b"".join(pieces)
            if reply.status != 204:
                reply.headers.setdefault("content-length", str(len(body)))
            await self._begin(reply)
            await self._piece(body, more=False)
            return
        with closing(reply):
            await self._begin(reply)
            await self._piece(reply.body, more=True)
            passed = PassedStream(self._request.path, self._request.id, reply.body)
            async for piece in passed.pieces(reply.receive, reply.content_type):
                await self._piece(piece, more=True)
            await self._piece(b"", more=False)

    async def _begin(self, reply: Reply) -> None:
        kind = {"content-type": reply.content_type} if reply.content_type else {}
        headers = {**kind, **reply.headers, "vary": "Origin"}
        if self._request.headers.get(ID_HEADER) != self._request.id:  # else the proxy says it
            headers[ID_HEADER] = self._request.id
        origin = self._request.headers.get("Origin", "")
        headers |= self._sites.headers_for(origin, self._request.method)
        written = [
            (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
        ]
        self.has_begun = True
        await self._send(
            {"type": "http.response.start", "status": reply.status, "headers": written}
        )

    async def _piece(self, body: bytes, *, more: bool) -> None:
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
