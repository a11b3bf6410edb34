"""`http_streams`: an MCP server at an address, by the SDK's own transports.

The SDK's transport ends when one of its requests cannot be sent, and with it all calls. So
`_HttpClient` answers such a request itself, with an error that the transport passes on to its call.
It also limits what the transport has to read and to keep.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import trio
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INVALID_REQUEST

from trioserve.errors import ToolServerError
from trioserve.tools.mcp.credentials import Bearer
from trioserve.tools.mcp.entries import HttpEntry
from trioserve.tools.mcp.messages import MAX_MESSAGE, TRANSPORT_FAILED, Intake, Outbox, Pace

if TYPE_CHECKING:
    from mcp.client._transport import WriteStream
    from mcp.shared.message import SessionMessage

    from trioserve.tools.mcp.stdio import Streams

#: Seconds to connect, and to send a request.
_CONNECT_SECONDS = 30.0

#: Seconds without a byte of an answer, which may be a stream with rare events.
_SILENCE_SECONDS = 300.0

#: The beginning of the message that a call was given up has this.
_CANCELLED = b'"method":"notifications/cancelled"'

#: Seconds for that message, and for the end of a session.
_BRIEF_SECONDS = 2.0

#: Bytes of messages that have arrived in part, of all answers together.
_MAX_INCOMPLETE = 4 * MAX_MESSAGE

#: Pieces of answers that are taken from a server in a second, and streams that it may end.
_PIECES_PER_SECOND = 5000
_STREAMS_PER_SECOND = 10

#: The end of an event of a stream: an empty line.
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")

_BEARER = "Bearer "
_EVENTS = "text/event-stream"
_PLAIN = "identity"
_SESSION = "mcp-session-id"

#: The headers of an answer that mean something.
_KEPT = ("content-type", "location", _SESSION)

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
            outbox = Outbox()
            background.start_soon(_pass_on, outbox, told)
            yield heard, outbox
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


async def _pass_on(outbox: Outbox, told: WriteStream[SessionMessage]) -> None:
    try:
        async with told:
            async for message, _ in outbox:
                await told.send(message)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # the transport has ended, and with it the stream from the server
    finally:
        outbox.end(now=True)


def _client(entry: HttpEntry, background: trio.Nursery) -> httpx2.AsyncClient:
    try:
        has_own = any(name.lower() == "authorization" for name in entry.headers)
        return _HttpClient(
            background,
            None if has_own else Bearer(entry.url),
            entry.name,
            headers={**entry.headers, "Accept-Encoding": _PLAIN},
            timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_SILENCE_SECONDS),
        )
    except (ValueError, TypeError, httpx2.InvalidURL) as error:  # an invalid header, a proxy
        raise ToolServerError(f"no client for it can be made: {error}") from None


class _HttpClient(httpx2.AsyncClient):
    """Sends the requests of the SDK's transport, and checks the answers.

    Args:
        background: where it sends that a call was given up, so that no other call waits for that.
        bearer: has the token of a login; None: the configuration has one.
        name: of the server.
        options: of the client.
    """

    def __init__(
        self, background: trio.Nursery, bearer: Bearer | None, name: str, **options: Any
    ) -> None:
        super().__init__(**options)
        self._background, self._bearer, self._name = background, bearer, name
        self._limits = _Limits()

    async def send(
        self, request: httpx2.Request, *, stream: bool = False, **options: Any
    ) -> httpx2.Response:
        await self._authorize(request)
        if request.method == "DELETE":  # the end of a session
            with trio.fail_after(_BRIEF_SECONDS):
                return await _emptied(await super().send(request, stream=True, **options))
        if request.method != "POST":
            await self._limits.streams.step()
            response = await super().send(request, stream=True, **options)
            return self._limited(response) if _has_events(response) else await _emptied(response)
        if _CANCELLED in (await request.aread())[:200]:
            self._background.start_soon(self._notify, request)
            return httpx2.Response(202, request=request)
        return await self._answer(request, **options)

    async def _answer(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, stream=True, **options)
            if response.status_code == 401 and self._bearer is not None:
                await response.aclose()
                if not await self._authorize(request, again=True):
                    return _failure(
                        request, f"it wants a login: run trioserve mcp login {self._name}"
                    )
                response = await super().send(request, stream=True, **options)
            return await self._checked(response)
        except httpx2.TransportError as error:
            why = str(error) or type(error).__name__
            return _failure(request, f"it cannot be reached: {why}")

    async def _authorize(self, request: httpx2.Request, *, again: bool = False) -> bool:
        """Put the token of a login into a request, or with `again` another one, if there is one."""
        if self._bearer is None:
            return False
        if again:
            refused = request.headers.get("authorization", "").removeprefix(_BEARER) or None
            if not await self._bearer.renew(refused):
                return False
        if (token := await self._bearer.token()) is None:
            return False
        request.headers["Authorization"] = f"{_BEARER}{token}"
        return True

    async def _notify(self, request: httpx2.Request) -> None:
        with trio.move_on_after(_BRIEF_SECONDS):
            await (await self._answer(request)).aclose()

    async def _checked(self, response: httpx2.Response) -> httpx2.Response:
        """An answer that is a stream, or was read, or else a description of its error."""
        request, content_type = response.request, response.headers.get("content-type", "").lower()
        encoding = response.headers.get("content-encoding", _PLAIN)
        if encoding != _PLAIN:  # the compressed length does not limit its size
            await response.aclose()
            return _failure(request, f"its answer is compressed by {encoding}, and need not be")
        if response.is_redirect:
            return await _emptied(response)
        if _has_events(response):
            return self._limited(response)
        messages = _Messages(response, self._limits)
        try:
            body = await messages.next() or b""
        except _RefusedError as error:
            return _failure(request, str(error))
        finally:
            await messages.aclose()
        if response.status_code == 404 and _SESSION in request.headers:
            return _failure(request, SESSION_LOST, INVALID_REQUEST)
        if response.is_error and not content_type.startswith("application/json"):
            status = f"{response.status_code} {response.reason_phrase}"
            return _failure(request, f"it answers with status {status}")
        return httpx2.Response(
            response.status_code, headers=_kept(response), content=body, request=request
        )

    def _limited(self, response: httpx2.Response) -> httpx2.Response:
        stream = _Events(_Messages(response, self._limits, _EVENT_END))
        return httpx2.Response(
            response.status_code, headers=_kept(response), stream=stream, request=response.request
        )


class _RefusedError(Exception):
    """The server sends too much. The message is for the call that waits for it."""


class _Limits:
    """The limits that all connections to a server share."""

    def __init__(self) -> None:
        self.intake = Intake()
        self.pieces, self.streams = Pace(_PIECES_PER_SECOND), Pace(_STREAMS_PER_SECOND)
        self.n_incomplete = 0  # bytes


class _Messages:
    """The messages of an answer, each as a whole.

    Not a generator, because the SDK leaves what it iterates to the garbage collector.

    Args:
        response: the answer. Close it with `aclose`.
        limits: of its server.
        end: what each of them ends with; None: all of the answer is one.
    """

    def __init__(
        self, response: httpx2.Response, limits: _Limits, end: re.Pattern[bytes] | None = None
    ) -> None:
        self._response, self._limits, self._end = response, limits, end
        self._pieces = response.aiter_raw()
        self._buffer = bytearray()
        self._searched = 0

    async def next(self) -> bytes | None:
        """The next one; None at the end. Raises _RefusedError: the server sends too much."""
        while (message := self._taken()) is None:
            self._check()
            await self._limits.pieces.step()
            piece = await anext(self._pieces, b"")
            if not piece:
                message = self._take(len(self._buffer))
                if not message:
                    return None
                break
            self._buffer += piece
            self._limits.n_incomplete += len(piece)
        problem = await self._limits.intake.admit(message)
        if problem is not None:
            raise _RefusedError(problem)
        return message

    def _taken(self) -> bytes | None:
        found = self._end and self._end.search(self._buffer, self._searched)
        if found:
            return self._take(found.end())
        self._searched = max(0, len(self._buffer) - 3)
        return None

    def _take(self, n_bytes: int) -> bytes:
        message = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        self._limits.n_incomplete -= n_bytes
        self._searched = 0
        return message

    def _check(self) -> None:
        if len(self._buffer) > MAX_MESSAGE:
            raise _RefusedError(f"its answer has more than {MAX_MESSAGE:,} bytes")
        if self._limits.n_incomplete > _MAX_INCOMPLETE:
            raise _RefusedError(f"its answers together have more than {_MAX_INCOMPLETE:,} bytes")

    async def aclose(self) -> None:
        self._take(len(self._buffer))
        await self._response.aclose()


class _Events(httpx2.AsyncByteStream):
    """The events of a stream, each as a whole. Too large a one is an error, and the last."""

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages
        self._is_over = False

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            event = await self._messages.next()
        except _RefusedError as error:  # the SDK knows whose answer this is
            event = b"data: %b\n\n" % json.dumps(_error(str(error), TRANSPORT_FAILED, 0)).encode()
            self._is_over = True
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        await self._messages.aclose()


def _has_events(response: httpx2.Response) -> bool:
    content_type = response.headers.get("content-type", "").lower()
    return response.is_success and content_type.startswith(_EVENTS)


def _kept(response: httpx2.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in _KEPT if name in response.headers}


async def _emptied(response: httpx2.Response) -> httpx2.Response:
    """An answer whose body is not read: it may be of any length."""
    await response.aclose()
    other = httpx2.Response(
        response.status_code, headers=_kept(response), content=b"", request=response.request
    )
    other.next_request = response.next_request
    return other


def _failure(
    request: httpx2.Request, problem: str, code: int = TRANSPORT_FAILED
) -> httpx2.Response:
    return httpx2.Response(502, json=_error(problem, code, None), request=request)


def _error(problem: str, code: int, id: int | None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": problem}}
