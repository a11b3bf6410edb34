"""`http_streams`: an MCP server at an address, by the SDK's own transports.

The SDK's transport ends when one of its requests cannot be sent, and with it all calls. So
`_HttpClient` answers such a request itself, with an error that the transport passes on to its call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import trio
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST

from trioserve.errors import ToolServerError
from trioserve.tools.mcp.entries import HttpEntry
from trioserve.tools.mcp.stdio import MAX_MESSAGE, TRANSPORT_FAILED

if TYPE_CHECKING:
    from mcp.client._transport import WriteStream

    from trioserve.tools.mcp.stdio import Streams

#: Seconds to connect, and to send a request.
_CONNECT_SECONDS = 30.0

#: Seconds without a byte of an answer, which may be a stream with rare events.
_SILENCE_SECONDS = 300.0

#: The beginning of the message that a call was given up has this.
_CANCELLED = b'"method":"notifications/cancelled"'

#: Seconds for that message, and for the end of a session.
_BRIEF_SECONDS = 2.0

#: Messages that wait to be sent.
_MAX_WAITING = 1000

_EVENTS = "text/event-stream"
_PLAIN = "identity"
_SESSION = "mcp-session-id"

#: The headers of an answer that mean something.
_KEPT = ("content-type", _SESSION)

#: The SDK's message for a session that the server does not have.
SESSION_LOST = "Session terminated"


@asynccontextmanager
async def http_streams(entry: HttpEntry) -> AsyncIterator[Streams]:
    """Connect to a server; gives the streams from it and to it. They are closed with the block.

    Raises:
        ToolServerError: the address cannot be used.
    """
    async with trio.open_nursery() as background:
        async with _transport(entry, background) as (heard, told):
            # Room for messages, so that a call that is given up does not wait for the network.
            put, taken = anyio.create_memory_object_stream[SessionMessage](_MAX_WAITING)
            background.start_soon(_pass_on, taken, told)
            yield heard, put
        background.cancel_scope.cancel()


@asynccontextmanager
async def _transport(entry: HttpEntry, background: trio.Nursery) -> AsyncIterator[Streams]:
    if entry.is_sse:

        def factory(
            headers: dict[str, str] | None = None,
            timeout: httpx2.Timeout | None = None,
            auth: httpx2.Auth | None = None,
        ) -> httpx2.AsyncClient:
            return _client(entry, background)

        async with sse_client(entry.url, httpx_client_factory=factory) as streams:
            yield streams
        return
    async with (
        _client(entry, background) as client,
        streamable_http_client(
            entry.url, http_client=client, max_sse_event_size=MAX_MESSAGE
        ) as streams,
    ):
        yield streams


async def _pass_on(
    taken: MemoryObjectReceiveStream[SessionMessage], told: WriteStream[SessionMessage]
) -> None:
    async with taken, told:
        async for message in taken:
            await told.send(message)


def _client(entry: HttpEntry, background: trio.Nursery) -> httpx2.AsyncClient:
    try:
        return _HttpClient(
            background,
            headers={**entry.headers, "Accept-Encoding": _PLAIN},
            timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_SILENCE_SECONDS),
        )
    except (ValueError, TypeError, httpx2.InvalidURL) as error:  # a header that is none, a proxy
        raise ToolServerError(f"no client for it can be made: {error}") from None


class _HttpClient(httpx2.AsyncClient):
    """Sends the requests of the SDK's transport, and checks the answers.

    Args:
        background: where it sends that a call was given up, so that no other call waits for that.
        options: of the client.
    """

    def __init__(self, background: trio.Nursery, **options: Any) -> None:
        super().__init__(**options)
        self._background = background

    async def send(
        self, request: httpx2.Request, *, stream: bool = False, **options: Any
    ) -> httpx2.Response:
        if request.method == "DELETE":  # the end of a session
            with trio.fail_after(_BRIEF_SECONDS):
                return await super().send(request, stream=stream, **options)
        if request.method != "POST":
            return await super().send(request, stream=stream, **options)
        if _CANCELLED in request.content[:200]:
            self._background.start_soon(self._notify, request)
            return httpx2.Response(202, request=request)
        return await self._answer(request, **options)

    async def _answer(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            return await _checked(await super().send(request, stream=True, **options))
        except httpx2.TransportError as error:
            why = str(error) or type(error).__name__
            return _failure(request, f"it cannot be reached: {why}")

    async def _notify(self, request: httpx2.Request) -> None:
        with trio.move_on_after(_BRIEF_SECONDS):
            await (await self._answer(request)).aclose()


async def _checked(response: httpx2.Response) -> httpx2.Response:
    """An answer that is a stream, or was read, or else a description of its error."""
    request, content_type = response.request, response.headers.get("content-type", "").lower()
    encoding = response.headers.get("content-encoding", _PLAIN)
    if encoding != _PLAIN:  # the compressed length does not limit its size
        await response.aclose()
        return _failure(request, f"its answer is compressed by {encoding}, and need not be")
    if response.is_redirect or (response.is_success and content_type.startswith(_EVENTS)):
        return response
    body = b""
    try:
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_MESSAGE:
                return _failure(request, f"its answer has more than {MAX_MESSAGE:,} bytes")
    finally:
        await response.aclose()
    if response.status_code == 404 and _SESSION in request.headers:
        return _failure(request, SESSION_LOST, INVALID_REQUEST)
    if response.is_error and not content_type.startswith("application/json"):
        status = f"{response.status_code} {response.reason_phrase}"
        return _failure(request, f"it answers with status {status}")
    kept = {name: response.headers[name] for name in _KEPT if name in response.headers}
    return httpx2.Response(response.status_code, headers=kept, content=body, request=request)


def _failure(
    request: httpx2.Request, problem: str, code: int = TRANSPORT_FAILED
) -> httpx2.Response:
    error = {"code": code, "message": problem}
    return httpx2.Response(
        502, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request
    )
