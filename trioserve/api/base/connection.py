"""One HTTP request, from ASGI messages to the end of its response.

quart-trio runs a request in a nursery and cancels it when the client disconnects. This subclass
keeps that behavior and fixes four problems:

- The last message of a response is sent under a shield. Hypercorn closes the connection within
  that call, but first reports the disconnect: without a shield, the cancellation that follows
  would leave the socket open.
- Resources that a handler opens for its response (such as a stream of tokens) are kept in
  `Request.resources`, and closed in the same task once the response has been sent or cut off.
- A client that sends a body over the limit gets the response before the connection closes, and
  Hypercorn's reader does not wait forever for a consumer of the rest. The response announces the
  close, so that the client does not send its next request on this connection.
- A client that stops reading is disconnected after a timeout. Hypercorn sends under a shield that
  no cancel scope reaches, so the socket is closed instead.
"""

from __future__ import annotations

import math
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import attrs
import structlog
import trio
from quart import request
from quart.utils import encode_headers
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from trio_util import AsyncValue

from trioserve.api.base.app_state import app_state_of
from trioserve.api.sessions import StreamSession
from trioserve.errors import RequestEndedError, TrioServeError
from trioserve.types import CancelReason

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
    from quart import Request as QuartRequest

    from trioserve.server.dispatch import Mailbox
    from trioserve.server.limits.memory import MemoryReservation

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]*)?", re.ASCII)

_log = structlog.stdlib.get_logger("trioserve.api")

#: `app.config` key: seconds that one send may take before the client is disconnected.
SEND_TIMEOUT = "TRIOSERVE_SEND_TIMEOUT"

#: `app.config` key: the path that comes before all routes.
PREFIX = "TRIOSERVE_PREFIX"

#: The header with the seconds that a request has already waited in a proxy.
WAITED_HEADER = "X-Request-Waited"

#: Seconds after the response in which a client may still send a body, which is discarded.
LINGER = 2.0

#: Seconds that a send in progress gets after its request is cancelled. They are counted in turns,
#: so that a pause of the whole machine costs the client only one turn.
GRACE = 1.0
_TURNS = 10


#: A comment, which clients skip. It keeps proxies from closing a silent connection.
PING = b":\n\n"


async def ping() -> bytes:
    """Make an empty comment."""
    return PING


@attrs.frozen
class KeepAlive:
    """Comments to send after `interval` seconds of silence in a response; `comment` makes each."""

    interval: float
    comment: Callable[[], Awaitable[bytes]] = ping


class Request(TrioRequest):
    """A request with what belongs to its response.

    `arrived` is when its head had been read (`trio.current_time`), here or at a proxy that says in
    `WAITED_HEADER` how long ago that was. `api_key` is the valid key that
    it showed; empty when none was needed. `limited_as` is whose rate limits it counts for, once it
    was counted. `held` is what it takes of the memory that requests may have, and `overload` is why
    its body was not kept. `resources` is unwound after the response, in the request's own task.
    `abort` closes the connection without waiting for the client; it may be called from any task.
    `mailboxes` are those whose events it sends. `keep_alive` is what is sent in silence.
    """

    arrived: float
    api_key: str = ""
    limited_as: str = ""
    held: MemoryReservation
    overload: TrioServeError | None = None
    resources: AsyncExitStack
    abort: Callable[[], None]
    mailboxes: list[Mailbox]
    keep_alive: KeepAlive | None = None

    def sends(self, mailbox: Mailbox) -> None:
        """Disconnect a client that stops reading, as soon as its mailbox or socket shows it."""
        mailbox.on_stalled = self.abort
        self.mailboxes.append(mailbox)

    def blame_client(self) -> None:
        """Note that what is cancelled from now on was not read, and not given up."""
        for mailbox in self.mailboxes:
            mailbox.cancel_reason = mailbox.cancel_reason or CancelReason.STALLED


def current_request() -> Request:
    """The request that this task handles."""
    return cast(Request, request._get_current_object())  # type: ignore[attr-defined]


def abort(send: Callable[..., Awaitable[None]]) -> bool:
    """Close the socket under an ASGI `send`, so that a send in progress fails at once.

    ASGI has no message for this. Hypercorn's callables are bound methods, and lead from the
    HTTP stream over the protocol to the server of the connection, which holds the transport.
    Returns False, and warns, where they do not: then the client's socket stays as it is. Where a
    session takes the answer, there is no socket, and the session ends.
    """
    if isinstance(session := getattr(send, "__self__", None), StreamSession):
        session.stop(RequestEndedError("The answer was cut off."))
        return True
    try:
        http_stream = send.__self__  # type: ignore[attr-defined]
        protocol = http_stream.send.__self__
        stream = protocol.send.__self__.stream
        transport = getattr(stream, "transport_stream", stream)  # under TLS
        sock = transport.socket
    except AttributeError:
        _log.warning("cannot close a stalled connection: this is not Hypercorn's Trio server")
        return False
    if sock.fileno() != -1:
        # Drop what the kernel has buffered for a client that does not read it.
        with suppress(OSError):  # some systems refuse that where the client has left
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    return True


class Sender:
    """Sends ASGI messages, one at a time.

    It cuts off a client that takes too long to receive one, and fills silence with comments.
    """

    def __init__(
        self, send: ASGISendCallable, timeout: float, on_stalled: Callable[[], None]
    ) -> None:
        self._send = send
        self._timeout = timeout
        self._on_stalled = on_stalled
        self._since: float | None = None  # when the send in progress began
        self._last = -math.inf  # when the last one began
        self._idle: trio.Event | None = None  # set when the send in progress has ended
        self._closing = False

    def abort(self) -> None:
        """Close the connection now, if this is Hypercorn's."""
        abort(self._send)

    async def __call__(self, message: Any) -> None:
        while self._since is not None:  # a comment is on its way
            await self._until_idle()
        self._since = self._last = trio.current_time()
        try:
            await self._send(message)
        finally:  # also when cancelled: `watch` would reset a connection that is idle
            self._since = None
            if self._idle is not None:
                self._idle.set()
                self._idle = None

    async def close(self, message: Any) -> None:
        """Send the last message under a shield, with no comments after it."""
        self._closing = True
        with trio.CancelScope(shield=True):
            await self(message)

    async def _until_idle(self) -> None:
        if self._idle is None:
            self._idle = trio.Event()
        await self._idle.wait()

    async def keep_alive(self, what: KeepAlive) -> None:
        """Send a comment after each `interval` without a message. Runs until cancelled."""
        while not self._closing:
            last = self._last
            await trio.sleep_until(last + what.interval)
            if self._since is not None:
                await self._until_idle()
            elif self._is_silent_since(last):
                data = await what.comment()
                if self._is_silent_since(last):
                    await self(_part(data))

    def _is_silent_since(self, last: float) -> bool:
        return self._last == last and self._since is None and not self._closing

    async def watch(self) -> None:
        """Abort when a send takes longer than the timeout. Runs until cancelled.

        When cancelled while a message is on its way, that one gets `GRACE` seconds.
        """
        try:
            while self._since is None or trio.current_time() < self._since + self._timeout:
                since = trio.current_time() if self._since is None else self._since
                await trio.sleep_until(since + self._timeout)
            _log.warning("client stopped reading", seconds=self._timeout)
            self._on_stalled()
            self.abort()
        finally:
            if self._since is not None:
                await self._finish()

    async def _finish(self) -> None:
        for _ in range(_TURNS):
            with trio.move_on_after(GRACE / _TURNS, shield=True):
                await self._until_idle()
            if self._since is None:  # it may have ended just when the turn was over
                return
        self.abort()


class Connection(TrioASGIHTTPConnection):
    """Handles one request. See the text at the top of the module."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Run the request. Returns when the response is sent or the client has disconnected."""
        if prefix := self.app.config.get(PREFIX):
            inside = self.scope["path"].startswith(f"{prefix}/")
            path = self.scope["path"] if inside else " "  # which no route has
            self.scope = {**self.scope, "root_path": prefix, "path": path}
        request = self._create_request_from_scope(send)
        assert isinstance(request, Request)
        request.arrived = trio.current_time() - _waited(request.headers.get(WAITED_HEADER, ""))
        self._answered = False  # there is a response, maybe of a body that is still on its way
        self._received = trio.Event()  # the whole body, or the client's farewell
        timeout = self.app.config.get(SEND_TIMEOUT) or math.inf
        sender = Sender(send, timeout, request.blame_client)
        request.abort = sender.abort
        request.mailboxes = []
        request.resources = AsyncExitStack()
        state = app_state_of(self.app)
        request.held = state.memory.hold()
        with counted(state.n_answering), request.held:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.handle_messages, nursery, request, receive)
                nursery.start_soon(sender.watch)
                await self.handle_request(nursery, request, sender)

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: QuartRequest, receive: ASGIReceiveCallable
    ) -> None:
        """Feed the body to the request, and cancel it when the client disconnects."""
        while True:
            message = await receive()
            if message["type"] == "http.request":
                self._take(request, message.get("body", b""))
                if not message.get("more_body", False):
                    request.body.set_complete()
                    self._received.set()
            elif message["type"] == "http.disconnect":
                self._received.set()
                nursery.cancel_scope.cancel()
                return

    def _take(self, request: QuartRequest, data: bytes) -> None:
        """Keep a part of the body, unless it exceeds the memory budget or will not be read."""
        assert isinstance(request, Request)
        if self._answered or request.overload is not None:
            return
        try:
            request.held.grow(len(data))
        except TrioServeError as error:
            request.overload = error
            request.body.clear()
            request.held.release()
            request.body.set_complete()
        else:
            request.body.append(data)

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: QuartRequest, send: ASGISendCallable
    ) -> None:
        """Call the handler and send its response; then end the request."""
        assert isinstance(request, Request)
        assert isinstance(send, Sender)
        async with request.resources:
            response = await self.app.handle_request(request)
            self._answered = True
            request.body.clear()
            headers = encode_headers(response.headers)
            if _has_body(request) and not self._received.is_set():
                headers.append((b"connection", b"close"))
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status_code,
                    "headers": headers,
                }
            )
            if request.keep_alive is not None:
                nursery.start_soon(send.keep_alive, request.keep_alive)
            await self._send_body(send, response)
        nursery.cancel_scope.cancel()

    async def _send_body(self, send: Sender, response: Any) -> None:
        async with response.response as parts:
            async for part in parts:
                await send(_part(part.encode() if isinstance(part, str) else part))
        await self._linger()
        await send.close(_part(b"", more=False))
        await self._linger()  # until Hypercorn has closed the connection, take what comes

    async def _linger(self) -> None:
        """Give a client that is still sending its body some time."""
        if not self._received.is_set():
            with trio.move_on_after(LINGER):
                await self._received.wait()


@contextmanager
def counted(counter: AsyncValue[int]) -> Iterator[None]:
    """Count the block for as long as it lasts."""
    counter.value += 1
    try:
        yield
    finally:
        counter.value -= 1


def _waited(value: str) -> float:
    """Read seconds; 0 when they are none. A client can only make its own time shorter."""
    return float(value) if _SECONDS.fullmatch(value) else 0.0


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"


def _part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
