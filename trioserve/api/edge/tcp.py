"""One TCP connection: Hypercorn's, and nothing that a client sends on it ends more than itself.

Hypercorn's Trio server catches `OSError`; whatever else a connection raises ends the process
(pgjones/hypercorn#225). `install` puts `TCPConnection` in the place of its class, which does what
that one does, and in addition:

- An exception ends its connection and is logged in one line.
- Each request has a cancel scope. It is cancelled as soon as the client leaves, also while further
  requests wait behind the one that is being answered; these are dropped.
- A client that stops reading is cut off: it gets a reset, and its request is cancelled. Hypercorn
  would wait for it in a shielded scope. A response that breaks off ends in a reset, too, so that
  no client takes it for complete.
- It speaks HTTP/1.1 only. A request to upgrade to h2c or to a websocket is answered as if it did
  not ask, which RFC 9110 (section 7.8) allows; HTTP/2's preface gets status 400.
- A request that can be read in two ways is refused: ``Transfer-Encoding`` beside
  ``Content-Length`` (request smuggling), a bare LF as the end of a line, a target that is neither
  a path nor a URL, and one that names another host than ``Host``.
- Requests that wait behind another are bounded, and so is the number of tiny chunks in a body.
- The descriptor is closed when the client has gone. Hypercorn keeps it for the rest of the
  keep-alive timeout.
- Beyond ``--max-connections``, the connection that has waited longest for its client is closed, of
  the address that has most. If all of them are busy, the new client gets status 503.
- The head of a request has a few seconds to arrive, and so has the first one of a connection.
- An event of a stream costs half as much; its head and its end go with the parts beside them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import struct
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import h11
import hypercorn.protocol
import hypercorn.trio.run
import trio
from hypercorn.events import Closed, Event as HypercornEvent, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.typing import ConnectionState

from trioserve.api.base import errors, request_log, sse
from trioserve.api.connections import NAME, Connections
from trioserve.api.edge.connection import HOLD, network_of
from trioserve.concurrency import TURN, Patience
from trioserve.errors import InvalidRequestError, TrioServeError, UnavailableError, first_error
from trioserve.hosts import parse_authority
from trioserve.log import get_logger
from trioserve.types import CancelReason

if TYPE_CHECKING:
    from hypercorn.events import Event
    from hypercorn.protocol.events import Event as StreamEvent
    from hypercorn.typing import AppWrapper, H11SendableEvent

_log = get_logger("trioserve.api")

#: Seconds that closing may take: under TLS it sends, and a client may not read.
_CLOSE_TIMEOUT = 2.0

#: Requests, and bytes of them, that may wait behind the one that is being answered.
_MAX_QUEUED = 16
_MAX_QUEUED_BYTES = 64 * 1024

#: A body may have this many chunks of any size, and more if they have this many bytes on average.
_MANY_CHUNKS = 4096
_SMALL_CHUNK = 16

#: Chunks of a body that are read between two turns of the event loop.
_CHUNKS_AT_ONCE = 256

#: Seconds from the first byte of a request's head to its last, and from the beginning of a
#: connection to the end of the first head. While nothing arrives, the keep-alive timeout holds.
HEAD_SECONDS = 10.0

#: The end of a head for h11, and an end of line that h11 takes, though RFC 9112 (section 2.2) does
#: not ask for it.
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_BARE_LF = re.compile(rb"(?<!\r)\n")

#: Clients that the server waits for at a time while they read that it has too many connections.
#: Others get the message, too, but the close that follows may discard it.
_MAX_REFUSED = 32


def install() -> None:
    """Have Hypercorn's Trio server use `TCPConnection`, also when its command started it."""
    hypercorn.trio.run.TCPServer = _server_of  # type: ignore[assignment, attr-defined]
    hypercorn.protocol.H11Protocol = _protocol_of  # type: ignore[assignment, attr-defined]


def _server_of(app: Any, *args: Any) -> TCPServer:
    return (TCPServer if _state_in(app) is None else TCPConnection)(app, *args)


def _protocol_of(app: Any, *args: Any) -> H11Protocol:
    return (H11Protocol if _state_in(app) is None else HTTP1)(app, *args)


@dataclass(frozen=True)
class Reset(Closed):
    """The connection ends in a reset: a response breaks off, or its client does not read it."""


@dataclass(frozen=True)
class HeadBegun(HypercornEvent):
    """A part of the head of a request has arrived."""


@dataclass(frozen=True)
class Received(HypercornEvent):
    """All of a request has arrived."""


class HTTP1(H11Protocol):
    """HTTP/1.1 without upgrades, and without requests that can be read in two ways.

    Of a body in chunks, it writes the chunks itself: they are the events of streams, and h11 takes
    10 µs for each.
    """

    _in_chunks = False  # whether the body of the response that is being sent is
    _unsent = b""  # what goes with what follows
    _holds = False  # whether what is written next does
    _n_chunks = _n_chunk_bytes = 0  # of the body that is being received
    _is_paused = False  # something waits behind the request that is being answered
    _is_full = False  # too much waits, or this is the last request: drop what follows
    _is_closed = False
    _head_begun = True  # for the first head, the time begins with the connection

    def __init__(self, app: AppWrapper, *args: Any) -> None:
        super().__init__(self._answer, *args)  # type: ignore[arg-type]
        self.connection_state = ConnectionState({**self.connection_state, HOLD: self.hold})
        self._app = app
        self._parsing = trio.Lock()
        self._scope = trio.CancelScope()  # of the request that is being answered

    async def _answer(self, *args: Any) -> None:
        """Have the app answer a request, within the scope that cancels it."""
        with self._scope:
            try:
                await self._app(*args)
            except TrioServeError as error:
                _log.warning("a response broke off", error=error.message)

    async def handle(self, event: Event) -> None:
        """Handle data from the client, or the end of the connection, which cancels the request."""
        if isinstance(event, RawData):
            if not (self._is_full or self._is_closed):
                self.connection.receive_data(event.data)
                await self._handle_events()
                await self._look_for_head()
            return
        self._is_closed = True
        if self.stream is not None:
            has_stalled = isinstance(event, Reset)
            reason = CancelReason.STALLED if has_stalled else CancelReason.DISCONNECT
            self._scope.cancel(reason=reason.value)
        await super().handle(event)

    async def _look_for_head(self) -> None:
        """Tell the connection when a part of a head has arrived, once for each head."""
        waits = not self._head_begun and self.connection.their_state is h11.IDLE
        if waits and self.connection.trailing_data[0]:
            self._head_begun = True
            await self.send(HeadBegun())

    async def _handle_events(self) -> None:
        """Handle what has arrived, to the end of the request that is being answered.

        What waits behind it does not stop the reader: it has to notice when the client leaves.
        """
        async with self._parsing:
            try:
                await self._parse()
            except h11.RemoteProtocolError as error:
                refused = InvalidRequestError(f"The request is malformed: {error}.")
                await self._refuse(refused, error.error_status_hint)
            except InvalidRequestError as error:
                await self._refuse(error, error.status)

    async def _refuse(self, error: TrioServeError, status: int) -> None:
        """End the connection because of what the client has sent."""
        self._is_closed = True
        address = "-" if self.client is None else network_of(self.client[0])
        request_log.tell_refused(address, status, error)
        self._scope.cancel(reason=CancelReason.DISCONNECT.value)
        if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self.send(RawData(data=_last_response(error, status)))
        await self.send(Closed())

    async def _parse(self) -> None:
        """Parse what has arrived. Raises RemoteProtocolError or InvalidRequestError."""
        parts: list[bytes] = []  # of a body
        while not self._is_closed:
            if self.connection.their_state is h11.MUST_CLOSE:
                self._is_full = True  # an answer that is on its way is not to end for it
                return
            if self.connection.they_are_waiting_for_100_continue:
                headers = self.config.response_headers("h11")
                await self._send_h11_event(
                    h11.InformationalResponse(status_code=100, headers=headers)
                )
            if self.connection.their_state is h11.IDLE:
                self._check_lines()
            event = self.connection.next_event()
            if isinstance(event, h11.Data):
                self._check_chunk(event)
                parts.append(event.data)
                if len(parts) < _CHUNKS_AT_ONCE:
                    continue
            if parts and self.stream is not None:
                await self.stream.handle(Body(stream_id=STREAM_ID, data=b"".join(parts)))
            parts = []
            if isinstance(event, h11.Request):
                await self.send(Updated(idle=False))
                await self._check_protocol(event)
                await self._create_stream(event)
            elif isinstance(event, h11.EndOfMessage) and self.stream is not None:
                await self.send(Received())
                await self.stream.handle(EndBody(stream_id=STREAM_ID))
            elif event is h11.PAUSED:
                queued, _ = self.connection.trailing_data
                too_many = queued.count(b" HTTP/1.1\r\n") > _MAX_QUEUED
                self._is_paused = True
                if self.connection.our_state is not h11.DONE:  # the response has not ended
                    self._is_full = too_many or len(queued) > _MAX_QUEUED_BYTES
                return
            elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return

    def _check_lines(self) -> None:
        """Refuse a head with a bare LF, which others may not take for the end of a line."""
        head, _ = self.connection.trailing_data
        end = _END_OF_HEAD.search(head)
        if _BARE_LF.search(head, 0, len(head) if end is None else end.end()):
            raise InvalidRequestError("A line of the request's head does not end in CR and LF.")

    def _check_chunk(self, part: h11.Data) -> None:
        self._n_chunks += part.chunk_start
        self._n_chunk_bytes += len(part.data)
        if self._n_chunks > max(_MANY_CHUNKS, self._n_chunk_bytes // _SMALL_CHUNK):
            raise InvalidRequestError(
                f"The body has more than {_MANY_CHUNKS} chunks, of less than {_SMALL_CHUNK} bytes "
                "on average."
            )

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of a response."""
        writing = self._in_chunks and self.connection.our_state is h11.SEND_BODY
        if writing and isinstance(event, Body):
            await self._write(b"%x\r\n%b\r\n" % (len(event.data), event.data))
        elif isinstance(event, StreamClosed) and self.connection.our_state is h11.SEND_BODY:
            await self._close_stream()
            await self.send(Reset())
        else:
            await super().stream_send(event)

    async def _maybe_recycle(self) -> None:
        if self._is_full:
            await self._close_stream()
            await self.send(Closed())
            return
        await super()._maybe_recycle()
        if self._is_paused and self.connection.our_state is h11.IDLE:
            self._is_paused = False
            self.task_group.spawn(self._handle_events)

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if self._is_closed:
            return
        data = self.connection.send(event)
        if isinstance(event, h11.Response):
            self._in_chunks = b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
            self._holds = self._holds or not self._in_chunks
        elif isinstance(event, h11.EndOfMessage):
            self._holds = False
        await self._write(data)

    def hold(self) -> None:
        """Write the next part of a response with what follows it at once: that costs half."""
        self._holds = True

    async def _write(self, data: bytes) -> None:
        data, self._unsent = self._unsent + data, b""
        if self._holds:
            self._unsent, self._holds = data, False
        elif data:
            await self.send(RawData(data=data))

    async def _check_protocol(self, event: h11.Request) -> None:
        """Refuse a request by its head. Raises InvalidRequestError."""
        if event.http_version not in (b"1.0", b"1.1"):
            raise InvalidRequestError("This server speaks HTTP/1.1 only.")
        names = {name for name, _ in event.headers}
        if {b"transfer-encoding", b"content-length"} <= names:
            raise InvalidRequestError("Transfer-Encoding and Content-Length exclude each other.")
        target = event.target.decode("ascii")
        if not _is_target(target):
            raise InvalidRequestError("The target of the request is neither a path nor a URL.")
        if not target.startswith(("/", "*")):
            hosts = [value.decode("latin-1") for name, value in event.headers if name == b"host"]
            named = parse_authority(urlsplit(target).netloc)
            if named is None or [named] != [parse_authority(host) for host in hosts]:
                raise InvalidRequestError("The target and Host name different servers.")

    async def _create_stream(self, request: h11.Request) -> None:
        self._scope = trio.CancelScope()
        self._n_chunks = self._n_chunk_bytes = 0
        self._head_begun = False
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        if len(headers) < len(request.headers):
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=headers,
                http_version=request.http_version,
            )
        await super()._create_stream(request)


def _last_response(error: TrioServeError, status: int, *headers: str) -> bytes:
    """Write a response that ends a connection."""
    body = sse.encode(errors.body(error)).encode()
    head = [
        f"HTTP/1.1 {status} ",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


class TCPConnection(TCPServer):
    """Serves one connection. Returns when it is closed; an error in it is logged, not raised."""

    _client_has_gone = False

    def __init__(self, app: AppWrapper, *args: Any) -> None:
        super().__init__(app, *args)
        state = _state_in(app)
        assert state is not None
        self._state = state
        # The watch over unread tokens comes first. This one is for what that does not count.
        self._send_timeout = 2 * state.config.stall_timeout
        self._turn = trio.CancelScope()  # of waiting for the client
        self._wait_for_client(HEAD_SECONDS)
        self._scope = trio.CancelScope()  # of the connection
        self._address = "-"  # of the client
        stream: Any = self.stream  # Hypercorn's annotation knows TLS only
        self._transport = getattr(stream, "transport_stream", stream)
        self._transport.send_all = self._send_all

    async def run(self) -> None:
        """Serve the client until either side closes the connection."""
        try:
            await self._serve()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client went away
        except* Exception as group:
            _log.warning("connection failed", error=repr(first_error(group)))
        finally:
            await self._close()

    async def _serve(self) -> None:
        state = self._state
        self._address = _address_of(self._transport.socket)
        limit = state.config.max_connections or max_connections()
        try:
            with state.connection(self._address, limit) as self._scope:
                await super().run()
        except UnavailableError as error:
            await self._refuse(error)

    async def protocol_send(self, event: Event) -> None:
        """Send what the protocol writes. Data that arrives while the connection closes is lost."""
        if isinstance(event, RawData):
            if rest := self._send_now(event.data):
                await self._send(rest)
        elif isinstance(event, Received):
            self._state.is_served(self._address, self._scope)
        elif isinstance(event, HeadBegun):
            self._wait_for_client(HEAD_SECONDS)
        elif isinstance(event, Updated):
            if self._client_has_gone:
                return  # a response has ended, and there is no next request to wait for
            self._state.waits(self._address, self._scope)
            if not event.idle:
                self._left = self._turn.deadline = math.inf
            else:
                self._wait_for_client(math.inf)
                if self.context.terminated.is_set():
                    await self.idle_task.restart(self._task_group, self._idle_timeout)
        else:
            if isinstance(event, Reset):
                self._reset()
            await super().protocol_send(event)

    def _wait_for_client(self, seconds: float) -> None:
        """Give the client some seconds from now on, at most those of an idle connection."""
        self._began = trio.current_time()
        self._left = min(seconds, self.config.keep_alive_timeout)
        self._turn.deadline = self._began + min(self._left, TURN)

    async def _idle_timeout(self) -> None:
        """Close the connection when the time of the client is over, or the server ends.

        One task does it for all requests. It counts in turns, as `Patience` does.
        """
        while self._left > 0:
            with self._turn:
                await self.context.terminated.wait()
                if self._left < math.inf:
                    break
                return  # the connection is closed once the response is sent
            self._turn = trio.CancelScope()
            if self._left < math.inf:  # else a request came as the turn ended
                self._wait_for_client(self._left - min(trio.current_time() - self._began, TURN))
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()

    async def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send data as it is. Raises OSError, or TooSlowError if the client does not read it."""
        patience, rest = Patience(self._send_timeout), memoryview(data)
        while rest:
            rest = rest[await patience.wait(partial(self._transport.socket.send, rest)) :]

    async def _send(self, data: bytes) -> None:
        """Send what the kernel does not take at once, and cut off a client that does not read.

        When cancelled, the connection ends, because a part of the data may be on its way.
        """
        try:
            async with self.send_lock:
                await self.stream.send_all(data)
        except trio.TooSlowError:
            _log.warning("client stopped reading", seconds=self._send_timeout)
            self._reset()
            await self.protocol.handle(Reset())
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.protocol.handle(Closed())
        except trio.Cancelled:
            self._reset()
            raise

    def _reset(self) -> None:
        """Close the socket, and drop what the kernel has buffered for the client."""
        sock = self._transport.socket
        with contextlib.suppress(OSError):  # some systems refuse that where the client has left
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    def _send_now(self, data: bytes) -> bytes:
        """Write as much as the kernel accepts without waiting. Returns the rest.

        Mostly it takes all. Then the lock and the two turns of the event loop, which Hypercorn and
        Trio take for it, would be half of what an event costs.
        """
        stream: Any = self.stream
        if sys.platform == "win32" or not hasattr(stream, "socket") or self.send_lock.locked():
            return data  # TLS would encrypt the bytes
        try:
            return data[os.write(stream.socket.fileno(), data) :]
        except OSError:
            return data  # full or closed; Hypercorn notices, too

    async def _read_data(self) -> None:
        await super()._read_data()
        self._client_has_gone = True
        await self.idle_task.stop()  # or the descriptor would stay open until it ends by itself

    async def _refuse(self, error: UnavailableError) -> None:
        """Respond that there are too many connections, without reading a request."""
        state = self._state
        request_log.tell_refused(self._address, error.status, error)
        stream: Any = self.stream  # Hypercorn's annotation knows TLS only
        is_plain, waits = hasattr(stream, "send_eof"), state.n_refused < _MAX_REFUSED
        if not waits and not is_plain:
            return  # TLS would wait for the client
        response = _last_response(error, error.status, "Retry-After: 1")
        state.n_refused += 1
        try:
            with trio.move_on_after(_CLOSE_TIMEOUT):
                await stream.send_all(response)
                if is_plain:
                    await stream.send_eof()
                if waits:  # with unread bytes, the close would be a reset
                    await stream.receive_some(2**16)
        finally:
            state.n_refused -= 1

    async def _close(self) -> None:
        with trio.move_on_after(_CLOSE_TIMEOUT, shield=True):
            await super()._close()


def _address_of(client: trio.socket.SocketType) -> str:
    """The address of a client. On a Unix socket, all clients are one: their proxy."""
    if client.family not in (socket.AF_INET, socket.AF_INET6):
        return "-"
    return network_of(client.getpeername()[0])


def _is_target(target: str) -> bool:
    try:
        urlsplit(target)  # as Quart will
    except ValueError:
        return False
    return target.startswith(("/", "http://", "https://", "*"))


def _state_in(app: Any) -> Connections | None:
    """The state of an app as Hypercorn wraps it; None if trioserve did not create the app."""
    extensions: dict[str, Any] = getattr(getattr(app, "app", None), "extensions", {})
    return extensions.get(NAME)


# -- file descriptors


if sys.platform != "win32":
    import resource

#: Descriptors reserved for files, and for refusing clients when there are too many.
RESERVE = 64


def raise_limit() -> None:
    """Let the process have as many descriptors as its hard limit allows."""
    if sys.platform == "win32":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> float:
    """The number of connections that the limit of descriptors allows now."""
    if sys.platform == "win32":
        return math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else max(1, limit - RESERVE)
