"""One HTTP request, from ASGI messages to the end of its response.

quart-trio runs a request in a nursery and cancels it when the client disconnects. This subclass
keeps that behavior and adds to it:

- Resources that a handler opens for its answer (such as a stream of tokens) are kept in
  `Caller.resources`, and closed in the same task once the answer has been sent or cut off.
- A client that sends a body over the limit gets the response before the connection closes, and
  Hypercorn's reader does not wait forever for a consumer of the rest. The response announces the
  close, so that the client does not send its next request on this connection.
- A disconnect after the last message cancels nothing: Hypercorn reports one at the end of each
  response, while it still has to close the connection or to start waiting for the next request.
- Comments fill the silence of a stream.

A response that breaks off ends in the `TrioServeError` that its body raised.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable
from contextlib import aclosing
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any, cast

import trio
from quart.utils import encode_headers
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.datastructures import Headers
from werkzeug.exceptions import RequestEntityTooLarge

from trioserve.api.base import request_log
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Ending, KeepAlive, Last, Reply
from trioserve.api.base.request_log import CLIENT_LEFT
from trioserve.api.base.routes import Route
from trioserve.api.edge.access import PUBLIC_RULES
from trioserve.concurrency import Bell, Patience, alongside
from trioserve.errors import BodyTimeoutError, PayloadTooLargeError, TrioServeError, first_error
from trioserve.types import CancelReason

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
    from quart import Request as QuartRequest

    from trioserve.api.edge.app import App

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]*)?", re.ASCII)

#: `app.config` key: the path that comes before all routes.
PREFIX = "TRIOSERVE_PREFIX"

#: The header of requests and answers with the id of the request.
ID_HEADER = "X-Request-Id"

#: The header with the seconds that a request has already waited in a proxy.
WAITED_HEADER = "X-Request-Waited"

#: The key of a connection's state with the function that has the next part of a response wait for
#: what follows it.
HOLD = "trioserve.hold"

#: Seconds after the response in which a client may still send a body, which is discarded.
LINGER = 2.0


class Body:
    """The body of a request, which is awaited as a whole.

    Quart's own differs between versions: 0.23 keeps every message in a queue without a bound.

    Args:
        expected_size: the size that the head of the request announces; None: unknown.
        max_size: the largest size that is accepted; None: any.
    """

    def __init__(self, expected_size: int | None, max_size: int | None) -> None:
        self._data = bytearray()
        self._complete = trio.Event()
        self._max_size = math.inf if max_size is None else max_size
        self._is_too_large = (expected_size or 0) > self._max_size

    def append(self, data: bytes) -> None:
        """Keep a part, unless the body is too large."""
        if self._is_too_large:
            return
        self._data += data
        if len(self._data) > self._max_size:
            self._is_too_large = True
            self.clear()
            self.set_complete()

    def set_complete(self) -> None:
        """Note that no more is kept: all of it is here, or the rest is not wanted."""
        self._complete.set()

    def clear(self) -> None:
        """Free what was kept."""
        self._data = bytearray()

    def __await__(self) -> Generator[Any, None, bytes]:
        """Wait until the body is complete. Raises RequestEntityTooLarge."""
        if not self._is_too_large:
            yield from self._complete.wait().__await__()
        if self._is_too_large:
            raise RequestEntityTooLarge
        return bytes(self._data)


class RequestHeaders(Headers):
    """The headers of a request. They do not change, so looking one up takes no search."""

    def __init__(self, headers: Headers) -> None:
        super().__init__(headers)
        self._first: dict[str, str] = {}
        for name, value in headers:
            self._first.setdefault(name.lower(), value)

    def get(  # type: ignore[override]  # of three overloads
        self, key: str, default: Any = None, type: Any = None
    ) -> Any:
        """The first header of a name, whatever its case."""
        if type is not None:
            return super().get(key, default, type)
        return self._first.get(key.lower(), default)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._first


class Request(TrioRequest):
    """A request with what belongs to its answer.

    Attributes:
        caller: its client, and what it holds.
        route: of its path, once it was looked for; None: no route has it.
        received: set when the whole body has been, or the client has left.
        overload: why its body was not kept.
        keep_alive: what is sent in silence.
        is_ready: whether the first part of its answer is there with the head.
        reply: its answer, if that began.
        status: of the answer, once its head is sent.
        is_sent: whether all of it is.
        is_quiet: whether it is logged at the level of debug, unless it is refused.
    """

    body_class = Body  # type: ignore[assignment]
    body: Body  # type: ignore[assignment]
    caller: Caller
    route: Route | None = None
    received: trio.Event
    overload: TrioServeError | None = None
    keep_alive: KeepAlive | None = None
    is_ready: bool = False
    reply: Reply | None = None
    status: int = CLIENT_LEFT
    is_sent: bool = False
    is_quiet: bool = False

    async def receive_whole(self, max_size: int | None, patience: float) -> bytes:
        """Receive the body, which is not kept.

        Raises:
            PayloadTooLargeError: it is larger than `max_size`.
            BodyTimeoutError: nothing of it came for `patience` seconds.
            MemoryFullError: requests hold too much memory as it is.
        """

        async def receive() -> bytes:
            return await self.body

        try:
            data = await Patience(patience).wait(receive)
        except trio.TooSlowError:
            raise BodyTimeoutError(f"No more of the body came for {patience:g} seconds.") from None
        except RequestEntityTooLarge:
            raise PayloadTooLargeError(
                f"The body is larger than max_body_size, which is {max_size} bytes."
            ) from None
        self.body.clear()
        if self.overload is not None:
            raise self.overload
        return data


def address_of(request: Request) -> str:
    """The address of a client. On a Unix socket, the client is a proxy, which names the address."""
    if request.scope.get("client") is None:
        named = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()
        return network_of(named[:_LONGEST_ADDRESS])
    return network_of(request.remote_addr or "")


#: Characters of an IPv6 address with the name of an interface.
_LONGEST_ADDRESS = 64


@lru_cache(maxsize=256)
def network_of(address: str) -> str:
    """The address that identifies a client: for IPv6 its /64, because a client has all of it."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address or "-"
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Network((int(parsed), 64), strict=False))


class Sender:
    """Sends ASGI messages, one at a time, and fills silence with comments.

    Those that `hold` go with the next one, which must follow at once: a head, or the last part.
    """

    def __init__(self, send: ASGISendCallable, hold: Callable[[], object] = bool) -> None:
        self._send, self._hold = send, hold
        self._is_sending, self._sent = False, Bell()
        self._last = -math.inf  # when the last send began
        self._keep_alive: KeepAlive | None = None
        self._silence = trio.CancelScope()  # until it is time to look whether a comment is due
        #: True once the last message is on its way.
        self.is_closing = False

    async def __call__(self, message: Any, *, hold: bool = False) -> None:
        await self._end_of_send()
        self._is_sending = True
        try:
            self._last = trio.current_time()
            if hold:
                self._hold()
            await self._send(message)
        finally:
            self._is_sending = False
            self._sent.ring()

    async def _end_of_send(self) -> None:
        """Wait for the message that is on its way, if there is one: the other task sends it."""
        while self._is_sending:
            await self._sent.wait()

    async def close(self, message: Any) -> None:
        """Send the last message, with no comments after it."""
        self.is_closing = True
        await self(message, hold=bool(message["body"]))

    def keep_alive(self, what: KeepAlive) -> None:
        """Have comments sent after each `interval` without a message."""
        self._keep_alive = what
        self._silence.deadline = self._last + what.interval

    async def beside(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Send comments while a function waits, which is called again after each of them."""
        while True:
            with self._silence:
                await wait()
                return
            await self._comment()

    async def _comment(self) -> None:
        what, last = self._keep_alive, self._last
        assert what is not None
        if self._is_sending:
            await self._end_of_send()
        elif trio.current_time() >= last + what.interval and not self.is_closing:
            data = await what.comment()
            if self._last == last and not (self._is_sending or self.is_closing):
                await self(_part(data))
        self._silence = trio.CancelScope()
        if not self.is_closing:
            self._silence.deadline = self._last + what.interval


class Connection(TrioASGIHTTPConnection):
    """Handles one request. See the text at the top of the module."""

    app: App

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Run the request. Returns when the response is sent or the client has disconnected."""
        if prefix := self.app.config.get(PREFIX):
            inside = self.scope["path"].startswith(f"{prefix}/")
            path = self.scope["path"] if inside else " "  # which no route has
            self.scope = {**self.scope, "root_path": prefix, "path": path}
        request = self._create_request_from_scope(send)
        assert isinstance(request, Request)
        self._answered = False  # there is a response, maybe of a body that is still on its way
        request.received = trio.Event()
        state: dict[str, Any] = self.scope.get("state") or {}  # none: of a test client
        self._sender = Sender(send, state.get(HOLD, bool))
        request.headers = headers = RequestHeaders(request.headers)
        with self.app.state.request() as held:
            request.caller = Caller(
                request_id=choose_id(headers.get(ID_HEADER)),
                method=request.method,
                path=request.path,
                arrived=trio.current_time() - _waited(headers.get(WAITED_HEADER, "")),
                held=held,
                address=address_of(request),
                headers=headers,
            )
            cut: str | None = None
            try:
                cut = await self._run(request, receive)
            except BaseException as raised:
                cut = _why(raised, request.caller)
                raise
            finally:
                _tell(request, cut)

    async def _run(self, request: Request, receive: ASGIReceiveCallable) -> str | None:
        """Run a request. Returns why it was cut off; None: it was not."""
        with trio.CancelScope() as scope:
            receiving = partial(self.handle_messages, scope, request, receive)
            async with alongside(partial(self._sender.beside, receiving)) as nursery:
                await self.handle_request(nursery, request, self._sender)
        return CancelReason.DISCONNECT.value if scope.cancelled_caught else None

    async def handle_messages(  # type: ignore[override]
        self, scope: trio.CancelScope, request: QuartRequest, receive: ASGIReceiveCallable
    ) -> None:
        """Feed the body to the request, and cancel it when the client disconnects.

        When cancelled, this loses no message.
        """
        assert isinstance(request, Request)
        while True:
            message = await receive()
            if message["type"] == "http.request":
                self._take(request, message.get("body", b""))
                if not message.get("more_body", False):
                    request.body.set_complete()
                    request.received.set()
            elif message["type"] == "http.disconnect":
                request.received.set()
                if not self._sender.is_closing:
                    scope.cancel(reason=CancelReason.DISCONNECT.value)
                return

    def _take(self, request: Request, data: bytes) -> None:
        """Keep a part of the body, unless it exceeds the memory budget or will not be read."""
        if self._answered or request.overload is not None:
            return
        try:
            request.caller.held.grow(len(data))
        except TrioServeError as error:
            request.overload = error
            request.body.clear()
            request.caller.held.release()
            request.body.set_complete()
        else:
            request.body.append(data)

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: QuartRequest, send: ASGISendCallable
    ) -> None:
        """Call the handler and send its response."""
        assert isinstance(request, Request)
        assert isinstance(send, Sender)
        async with request.caller.resources:
            response = await self.app.respond(request)
            self._answered = True
            request.status = response.status
            request.body.clear()
            headers = encode_headers(response.headers)
            if _has_body(request) and not request.received.is_set():
                headers.append((b"connection", b"close"))
            await send(
                {"type": "http.response.start", "status": response.status, "headers": headers},
                hold=request.is_ready,
            )
            if request.keep_alive is not None:
                send.keep_alive(request.keep_alive)
            last = await self._send_body(() if request.method == "HEAD" else response.pieces)
            request.is_sent = not last
            await _linger(request)
            await send.close(_part(last, more=False))
            request.is_sent = True
            await _linger(request)  # until Hypercorn has closed the connection, take what comes

    async def _send_body(self, pieces: Iterable[bytes] | AsyncIterable[bytes]) -> bytes:
        """Send the pieces of a body; returns the last one, where it says that it is."""
        if not isinstance(pieces, AsyncIterable):
            for piece in pieces:
                await self._sender(_part(piece))
            return b""
        async with aclosing(cast(AsyncGenerator[bytes, None], pieces)) as parts:
            async for part in parts:
                if isinstance(part, Last):
                    return part
                await self._sender(_part(part))
        return b""


def _why(raised: BaseException, caller: Caller) -> str | None:
    """Why a request is cut off by what it raised; None: it has failed, which its caller notes."""
    error = first_error(raised)
    if isinstance(error, trio.Cancelled):
        return error.reason or CancelReason.SHUTDOWN.value
    caller.tally.error = error
    return None


def _tell(request: Request, cut: str | None) -> None:
    """Log a request that has been answered, or cut off."""
    caller, route, status = request.caller, request.route, request.status
    if caller.is_told:
        return
    if isinstance(request.reply, Ending) and request.reply.failure is not None:
        caller.tally.error = request.reply.failure
    path = None if route is None or not route.path.startswith(PUBLIC_RULES) else route.path
    more = {} if cut is None or request.is_sent else {"cancelled": cut}
    is_quiet = request.is_quiet and (status < 400 or status == 503)  # 503: not ready yet
    request_log.tell(caller, status, path, is_quiet=is_quiet, **more)


async def _linger(request: Request) -> None:
    """Give a client that is still sending its body some time."""
    if not request.received.is_set():
        with trio.move_on_after(LINGER):
            await request.received.wait()


def choose_id(offered: str | None) -> str:
    """Use the id that a client offers, if it is safe in a log line; else make one."""
    if offered is not None and _ID.fullmatch(offered):
        return offered
    return secrets.token_hex(12)


def _waited(value: str) -> float:
    """Read seconds, 0 for other text. A client can only make its own time shorter."""
    return float(value) if _SECONDS.fullmatch(value) else 0.0


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"


def _part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
