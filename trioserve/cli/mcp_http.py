"""``trioserve mcp --http``: the MCP server over streamable HTTP, with the server's own checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias

import trio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.responses import JSONResponse, Response
from werkzeug.datastructures import Headers

from trioserve.api.base import access, errors, tcp
from trioserve.api.base.app_state import NAME, Connections
from trioserve.api.base.connection import LINGER
from trioserve.config import Config
from trioserve.errors import NotFoundError, TrioServeError
from trioserve.mcp_server.serving import ENDED, mcp_server

if TYPE_CHECKING:
    from trioserve.mcp_server.models import ModelSource

#: Where clients find the server, after ``--api-prefix``.
PATH = "/mcp"

#: Sessions at the same time. The SDK ends one after 30 minutes without a request.
_MAX_SESSIONS = 1000

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]


@asynccontextmanager
async def mcp_app(
    models: ModelSource, config: Config, *, max_sessions: int = _MAX_SESSIONS
) -> AsyncIterator[McpApp]:
    """Make an ASGI app that offers models. Leaving the block ends its sessions and their calls."""
    manager = StreamableHTTPSessionManager(
        mcp_server(models), max_request_body_size=config.max_body_size, max_sessions=max_sessions
    )
    async with manager.run():
        yield McpApp(manager, config)


class McpApp:
    """Checks requests as the server does, and passes them to the sessions of the SDK."""

    def __init__(self, manager: StreamableHTTPSessionManager, config: Config) -> None:
        tcp.install()
        self.extensions = {NAME: Connections(config)}  # `tcp` looks for it
        self._manager = manager
        self._config = config

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        headers = Headers([(name.decode("latin-1"), value.decode("latin-1"))
                           for name, value in scope["headers"]])  # fmt: skip
        method, config = scope["method"], self._config
        allowing = access.headers_for(headers.get("Origin", ""), method, config)
        send = _with_headers(send, {"Vary": "Origin", **allowing})
        if method == "OPTIONS":
            await Response()(scope, receive, send)
            return
        try:
            path = scope["path"].removeprefix(config.api_prefix)
            access.check(path, headers, (scope.get("server") or ("",))[0], config)
            if path in access.OPEN:
                await JSONResponse({"status": "ok"})(scope, receive, send)
                return
            if path != PATH:
                raise NotFoundError(f"The MCP server is at {config.api_prefix}{PATH}.")
            if config.api_keys:
                scope["user"] = _user_of(access.valid_key(headers, config))
        except TrioServeError as error:
            await _discard(receive)
            answer = JSONResponse(errors.body(error), status_code=error.status)
            await answer(scope, receive, send)
            return
        scope[ENDED] = ended = trio.Event()
        try:
            await self._manager.handle_request(scope, receive, send)
        finally:
            ended.set()


def _user_of(key: str) -> AuthenticatedUser:
    """The owner of a session, which the SDK gives to no other key."""
    return AuthenticatedUser(AccessToken(token=key, client_id=key, scopes=[]))


async def _discard(receive: _Receive) -> None:
    """Read a body without keeping it: Hypercorn closes a connection with an unread one."""
    with trio.move_on_after(LINGER):
        while (await receive()).get("more_body"):
            pass


def _with_headers(send: _Send, headers: Mapping[str, str]) -> _Send:
    more = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def send_more(message: _Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
            if message["status"] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # the SDK has not read it
                message["headers"].append((b"connection", b"close"))
        await send(message)

    return send_more


async def _live(receive: _Receive, send: _Send) -> None:
    """Answer that the app has begun, and that it has ended: `mcp_app` does both."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})
