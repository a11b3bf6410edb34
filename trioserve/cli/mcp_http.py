"""``trioserve mcp --http``: the MCP server over streamable HTTP, with the server's own checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import trio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.responses import JSONResponse, Response
from werkzeug.datastructures import Headers

from trioserve.api.base import errors
from trioserve.api.connections import NAME, Connections
from trioserve.api.edge import access, tcp
from trioserve.api.edge.connection import LINGER, network_of
from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.errors import NotFoundError, PayloadTooLargeError, TrioServeError
from trioserve.fair_limiter import current_client, offload, set_client
from trioserve.mcp_server.serving import ENDED, mcp_server
from trioserve.server.keys import Keys
from trioserve.server.limits.memory import MemoryBudget, MemoryReservation, weight_of
from trioserve.tools.mcp.messages import MAX_VALUES, count_values

if TYPE_CHECKING:
    from mcp.server.auth.middleware.bearer_auth import AuthorizationContext

    from trioserve.mcp_server.models import ModelSource

#: The path of the server, after ``--api-prefix``.
PATH = "/mcp"

#: Sessions at the same time. The SDK ends one after 30 minutes without a request.
_MAX_SESSIONS = 1000

#: Bytes of a body that is looked through on the event loop.
_SHORT_BODY = 32 * 1024

#: Bytes of an `initialize`, which a session keeps.
_MAX_INTRODUCTION = 64 * 1024

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]


@asynccontextmanager
async def mcp_app(
    models: ModelSource,
    config: Config,
    keys: Keys | None = None,
    *,
    max_sessions: int = _MAX_SESSIONS,
) -> AsyncIterator[McpApp]:
    """Make an ASGI app that offers models. Leaving the block ends its sessions and their calls.

    By default, the API keys are those of the configuration, without a file.
    """
    manager = _Sessions(
        mcp_server(models), max_request_body_size=config.max_body_size, max_sessions=max_sessions
    )
    keys = keys or Keys(config)
    app = McpApp(manager, config, keys)
    async with manager.run(), alongside(app.memory.keep_trim, keys.follow):
        yield app


class _Sessions(StreamableHTTPSessionManager):
    """Sessions of clients. If there are as many as there may be, one of the client that has most
    makes room: the one that has waited longest for a request.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._client_of = WeakKeyDictionary[StreamableHTTPServerTransport, str]()

    def _admit_session(
        self, requestor: AuthorizationContext | None
    ) -> StreamableHTTPServerTransport | None:
        if self.max_sessions is not None and len(self._server_instances) >= self.max_sessions:
            self._end_one_for(current_client())
        made = super()._admit_session(requestor)
        if made is not None:
            self._client_of[made] = current_client()
        return made

    def _end_one_for(self, client: str) -> None:
        held = {id_: self._client_of[one] for id_, one in self._server_instances.items()}
        n_of = Counter([*held.values(), client])
        most = max(n_of.values())
        ends = {  # when each would end without a request; never, while it has one
            id_: one.idle_scope.deadline
            for id_, one in self._server_instances.items()
            if one.idle_scope is not None and n_of[held[id_]] == most
        }
        id_ = min(ends, key=ends.__getitem__, default="")
        if id_ and ends[id_] < math.inf:
            transport = self._server_instances.pop(id_)
            self._session_owners.pop(id_, None)
            assert transport.idle_scope is not None
            transport.idle_scope.cancel()


class _Head(msgspec.Struct):
    """The fields of a message that are read."""

    method: str = ""


class McpApp:
    """Checks requests as the server does, and passes them to the sessions of the SDK."""

    def __init__(self, manager: StreamableHTTPSessionManager, config: Config, keys: Keys) -> None:
        tcp.install()
        self.extensions = {NAME: Connections(config)}  # `tcp` looks for it
        #: Memory for the bodies of requests and their values.
        self.memory = MemoryBudget.of(config)
        self._manager = manager
        self._config = config
        self._sites = access.Sites(config)
        self._keys = keys

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        headers = Headers([(name.decode("latin-1"), value.decode("latin-1"))
                           for name, value in scope["headers"]])  # fmt: skip
        method, config = scope["method"], self._config
        allowing = self._sites.headers_for(headers.get("Origin", ""), method)
        send = _with_headers(send, {"Vary": "Origin", **allowing})
        if method == "OPTIONS":
            await Response()(scope, receive, send)
            return
        with self.memory.hold() as held:
            try:
                path = scope["path"].removeprefix(config.api_prefix)
                self._sites.check(path, headers, (scope.get("server") or ("",))[0])
                if path in access.OPEN:
                    await JSONResponse({"status": "ok"})(scope, receive, send)
                    return
                if path != PATH:
                    raise NotFoundError(f"The MCP server is at {config.api_prefix}{PATH}.")
                set_client(network_of((scope.get("client") or ("",))[0]))
                if self._keys.needed:
                    key = access.shown_key(headers)
                    await self._keys.check(key)
                    # The owner of a session, which the SDK gives to no other key.
                    scope["user"] = AuthenticatedUser(
                        AccessToken(token=key, client_id=key, scopes=[])
                    )
                    held.belongs_to(key)
                    set_client(key)
                if method == "POST":
                    length = headers.get("Content-Length", 0, int)
                    body = await _read(receive, held, length, config.max_body_size)
                    receive = _with_body(body, receive)
            except TrioServeError as error:
                held.release()
                await _discard(receive)
                answer = JSONResponse(errors.body(error), error.status, errors.headers_of(error))
                await answer(scope, receive, send)
                return
            scope[ENDED] = ended = trio.Event()
            try:
                await self._manager.handle_request(scope, receive, send)
            finally:
                ended.set()


async def _read(receive: _Receive, held: MemoryReservation, length: int, most: int) -> bytes:
    """Read a body of an announced `length` (0: unknown), counting memory. Raises TrioServeError."""
    body, has_more = bytearray(), True
    while has_more:
        message = await receive()
        part = message.get("body", b"")
        if max(length, len(body) + len(part)) > most:
            raise PayloadTooLargeError(f"The body has more than {most} bytes.")
        held.grow(len(part))
        body += part
        has_more = message.get("more_body", False)
    whole = bytes(body)
    weight = await offload(partial(_checked_weight, whole), len(whole), _SHORT_BODY)
    held.grow(weight - len(whole))
    return whole


def _checked_weight(body: bytes) -> int:
    """The memory that a message takes. Raises PayloadTooLargeError."""
    if count_values(body) > MAX_VALUES:
        raise PayloadTooLargeError(f"The body has more than {MAX_VALUES:,} values.")
    if len(body) > _MAX_INTRODUCTION:
        try:
            method = msgspec.json.decode(body, type=_Head).method
        except msgspec.DecodeError:
            method = ""  # the SDK says what is wrong
        if method == "initialize":
            raise PayloadTooLargeError(f"`initialize` has at most {_MAX_INTRODUCTION:,} bytes.")
    return weight_of(body)


def _with_body(body: bytes, receive: _Receive) -> _Receive:
    """Receive a body that was read already, and then what comes after it."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_more() -> _Message:
        return messages.pop() if messages else await receive()

    return receive_more


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
    """Answer the startup and shutdown events of ASGI; `mcp_app` runs the server."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})
