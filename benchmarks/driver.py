"""Many clients on one selector: each sends its requests one after the other and notes times.

One thread, no task for a client, no parsing of bodies: the generator must cost far less than what
it measures. `wire` says what requests mean, and `stats` what the times do.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import attrs

from benchmarks.http1 import ProtocolError, ResponseReader

RECV_SIZE = 64 * 1024
MAX_CLIENTS = 4096
#: Seconds between two checks for requests that have taken too long.
_CHECK_EVERY = 0.25

#: The error of a background request that was running when the run ended.
UNFINISHED = "unfinished"

#: The error of a request that was given up as planned.
CANCELLED = "cancelled"


@attrs.frozen
class Address:
    """The address of a server. `host` is an IP address; `prefix` goes before each path."""

    host: str
    port: int
    prefix: str = ""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@attrs.frozen
class Request:
    """One HTTP request. `body` is JSON, or empty for none.

    The client closes the connection `cancel_after` seconds after it turned to the request.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    cancel_after: float = math.inf

    def encode(self, address: Address, *, keep_alive: bool = True) -> bytes:
        """Return the bytes of the request."""
        lines = [
            f"{self.method} {address.prefix}{self.path} HTTP/1.1",
            f"Host: {address.authority}",
            f"Connection: {'keep-alive' if keep_alive else 'close'}",
            "Accept: */*",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        if self.body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(self.body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


@attrs.frozen(kw_only=True)
class Outcome:
    """The result of one request. Times are of `time.perf_counter`.

    `sent` is when the client turned to the request (connecting, where it had to, comes after).
    `error` is empty when a whole response arrived, whatever its status.
    """

    client: int
    sent: float
    ended: float
    first_byte: float | None = None
    status: int = 0
    error: str = ""
    sse: bool = False
    times: tuple[float, ...] = ()
    body: bytes = b""


@attrs.frozen(kw_only=True)
class Plan:
    """The requests of one client, one after the other.

    A background plan repeats until the others are done. Then its request is given up, with the
    error `UNFINISHED`.
    """

    requests: Sequence[Request] = ()
    delay: float = 0.0  # seconds after the beginning of the run
    after_events: int = 0  # begin once every plan without this number has received so many
    #: Gets each whole answer, and returns the request that comes next, before the others.
    then: Callable[[Outcome], Request | None] | None = None
    pause: float = 0.0  # seconds between two requests
    background: bool = False
    hold: bool = False  # only open the connection


@attrs.frozen(kw_only=True)
class Run:
    """The outcomes of a run, in the order in which they ended, and what the generator used."""

    outcomes: tuple[Outcome, ...]
    wall: float
    cpu: float  # seconds of CPU that this process used meanwhile
    held: int = 0  # connections of `hold` plans that the server had not closed at the end

    @property
    def events(self) -> int:
        """The number of SSE events that arrived."""
        return sum(len(outcome.times) for outcome in self.outcomes)


class _Client:
    """One client: a connection, and the plan it works through."""

    def __init__(self, number: int, plan: Plan, driver: Driver) -> None:
        self.number = number
        self.plan = plan
        self.driver = driver
        self.requests: Iterator[Request] = iter(
            itertools.cycle(plan.requests) if plan.background else plan.requests
        )
        self.request: Request | None = None
        self.follow: Request | None = None  # comes before the rest of `requests`
        self.sock: socket.socket | None = None
        self.reader = ResponseReader()
        self.sent = 0.0
        self.unsent = b""
        self.fresh = True  # nothing came back on this connection yet
        self.done = False
        self.events = 0

    # -- what the plan says

    def begin(self) -> None:
        """Take the next request, or end. A `hold` plan only connects."""
        if self.plan.hold:
            if self._connect():
                self.driver.watch(self._open(), selectors.EVENT_WRITE, self._connected)
            return
        self.request = self.follow or next(self.requests, None)
        self.follow = None
        if self.request is None or (self.plan.background and self.driver.winding_up):
            self.finish()
            return
        self.sent = time.perf_counter()
        if self.request.cancel_after < math.inf:
            when = self.sent + self.request.cancel_after
            self.driver.call_at(when, partial(self._cancel, self.request))
        self._send()

    def _cancel(self, request: Request) -> None:
        if self.request is request:
            self._complete(time.perf_counter(), CANCELLED)

    def finish(self) -> None:
        """Mark the plan as worked through. A connection that is held stays open."""
        self.request = None
        if not self.plan.hold:
            self.close()
        if not self.done:
            self.done = True
            self.driver.client_done(self)

    def _complete(self, now: float, error: str = "") -> None:
        reader = self.reader
        outcome = Outcome(
            client=self.number,
            sent=self.sent,
            ended=now,
            first_byte=reader.first_byte,
            status=reader.status,
            error=error,
            sse=reader.sse,
            times=tuple(reader.times),
            body=reader.body,
        )
        self.driver.outcomes.append(outcome)
        self.request = None
        if self.plan.then is not None and not error and reader.status == 200:
            self.follow = self.plan.then(outcome)
        if error or not (reader.keep_alive and self.driver.keep_alive):
            self.close()
        if self.plan.hold:
            self.finish()
        elif self.plan.pause or error:
            # A client whose request failed waits a little, or a dead server would be hammered.
            self.driver.call_at(now + max(self.plan.pause, 0.01 if error else 0.0), self.begin)
        else:
            self.begin()

    # -- the connection

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.sock is not None:
            self.driver.forget(self.sock)
            self.sock.close()
            self.sock = None

    def holds(self) -> bool:
        """Say whether a held connection is still open on the other side as well."""
        if not self.plan.hold or self.sock is None:
            return False
        try:
            return self.sock.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _open(self) -> socket.socket:
        assert self.sock is not None
        return self.sock

    def _connected(self, now: float) -> None:
        sock = self._open()
        self.driver.forget(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._complete(now, f"connect: {errno.errorcode.get(code, code)}")
        else:
            self.finish()

    def _connect(self) -> bool:
        address = self.driver.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fresh = True
        code = self.sock.connect_ex((address.host, address.port))
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            self._complete(time.perf_counter(), f"connect: {errno.errorcode.get(code, code)}")
            return False
        return True

    def _send(self) -> None:
        assert self.request is not None
        self.reader = ResponseReader()
        driver = self.driver
        self.unsent = self.request.encode(driver.address, keep_alive=driver.keep_alive)
        if self.sock is None:
            if self._connect():
                driver.watch(self._open(), selectors.EVENT_WRITE, self._writable)
        else:
            driver.watch(self.sock, selectors.EVENT_WRITE, self._writable)
            self._writable(self.sent)

    def _writable(self, now: float) -> None:
        sock = self._open()
        try:
            count = sock.send(self.unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(now, f"send: {error.strerror}")
            return
        self.unsent = self.unsent[count:]
        if not self.unsent:
            self.driver.watch(sock, selectors.EVENT_READ, self._readable)

    def _readable(self, now: float) -> None:
        try:
            data = self._open().recv(RECV_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(now, f"receive: {error.strerror}")
            return
        if self.request is None:  # between two requests: the server closes, or talks nonsense
            self.close()
            return
        if not data:
            if self.reader.close():
                self._complete(now)
            else:
                self._lost(now, "the connection ended before the response did")
            return
        try:
            done = self.reader.feed(data, now)
        except ProtocolError as error:
            self._complete(now, f"protocol: {error}")
            return
        self.fresh = False
        if self.driver.someone_waits:
            self.events = len(self.reader.times)
            self.driver.count_events()
        if done:
            self._complete(now)

    def _lost(self, now: float, error: str) -> None:
        # A kept connection may end just as the next request goes out: that one is sent again.
        reused = not self.fresh and self.reader.first_byte is None
        self.close()
        if reused:
            self._send()
        else:
            self._complete(now, error)

    def give_up(self, now: float, error: str) -> None:
        """End the running request with an error."""
        self._complete(now, error)


class Driver:
    """Runs plans against one server. Use `run`."""

    def __init__(self, address: Address, *, keep_alive: bool, timeout: float) -> None:
        self.address = address
        self.keep_alive = keep_alive
        self.timeout = timeout
        self.outcomes: list[Outcome] = []
        self.winding_up = False
        self.held = 0
        self.someone_waits = False
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self._clients: list[_Client] = []
        self._waiting: list[_Client] = []
        self._running = 0
        self._foreground = 0

    # -- for the clients

    def watch(self, sock: socket.socket, mask: int, action: Callable[[float], None]) -> None:
        """Call `action` when the socket is ready."""
        try:
            self._selector.modify(sock, mask, action)
        except KeyError:
            self._selector.register(sock, mask, action)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching the socket, if it is watched."""
        if sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock)

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at that time."""
        heapq.heappush(self._timers, (when, next(self._tie), action))

    def client_done(self, client: _Client) -> None:
        """Count a client that is through. The last one ends those in the background."""
        self._running -= 1
        if client.plan.background:
            return
        self._foreground -= 1
        if self._foreground == 0:
            self.winding_up = True
        elif self.someone_waits:
            self.count_events()

    def count_events(self) -> None:
        """Start the clients that wait until the others have received enough events."""
        leaders = [c for c in self._clients if c not in self._waiting and not c.plan.background]
        fewest = min((c.events for c in leaders if not c.done), default=None)
        for client in list(self._waiting):
            if fewest is None or fewest >= client.plan.after_events:
                self._waiting.remove(client)
                self.call_at(time.perf_counter(), client.begin)
        self.someone_waits = bool(self._waiting)

    # -- the loop

    def run(self, plans: Sequence[Plan], max_time: float, before_close: Callable[[], None]) -> None:
        """Work through the plans. What runs after `max_time` seconds is given up."""
        started = time.perf_counter()
        self._clients = [_Client(number, plan, self) for number, plan in enumerate(plans)]
        self._running = len(plans)
        self._foreground = sum(not plan.background for plan in plans)
        self._waiting = [client for client in self._clients if client.plan.after_events]
        self.someone_waits = bool(self._waiting)
        for client in self._clients:
            if not client.plan.after_events:
                self.call_at(started + client.plan.delay, client.begin)
        now, check_at = started, started + _CHECK_EVERY
        try:
            while self._running and not self.winding_up:
                now = self._step(check_at)
                if now >= check_at:
                    check_at = now + _CHECK_EVERY
                    self._give_up_late(now, now - started >= max_time, max_time)
            before_close()
            self.held = sum(client.holds() for client in self._clients)
            for client in self._clients:
                if client.request is not None:
                    client.give_up(now, UNFINISHED)
        finally:
            for client in self._clients:
                client.close()
            self._selector.close()

    def _step(self, until: float) -> float:
        """Wait for sockets and timers, at most until that time, and act. Returns the time."""
        if self._timers:
            until = min(until, self._timers[0][0])
        ready = self._selector.select(max(0.0, until - time.perf_counter()))
        now = time.perf_counter()  # one reading for all that was ready: when it arrived
        for key, _mask in ready:
            key.data(now)  # closes no socket but its own, so what is ready stays valid
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        return now

    def _give_up_late(self, now: float, over: bool, max_time: float) -> None:
        if over:
            self._timers.clear()
            self.winding_up = True
        for client in self._clients:
            if client.request is None:
                continue
            if over:
                client.requests, client.follow = iter(()), None
                client.give_up(now, f"the run took longer than {max_time:g} s")
            elif now - client.sent > self.timeout:
                client.give_up(now, f"no end after {self.timeout:g} s")


def _allow_descriptors(count: int) -> None:
    """Raise the limit on open files where a run needs more.

    Raises:
        ValueError: the system does not allow that many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 64
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(f"{count} clients need {needed} open files, and the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def run(
    address: Address,
    plans: Iterable[Plan],
    *,
    keep_alive: bool = True,
    timeout: float = 120.0,
    max_time: float = 600.0,
    before_close: Callable[[], None] = lambda: None,
) -> Run:
    """Work through the plans and return what happened.

    Each request gets `timeout` seconds, the whole run `max_time`. `before_close` is called when
    the foreground is done, and all that is held or in the background is still open. Requests that
    fail are outcomes with an `error`, never exceptions. All connections are closed on return.

    Raises:
        ValueError: there are no plans, or more than `MAX_CLIENTS`.
    """
    plans = tuple(plans)
    if not 0 < len(plans) <= MAX_CLIENTS:
        raise ValueError(f"{len(plans)} clients; it must be between 1 and {MAX_CLIENTS}")
    _allow_descriptors(len(plans))
    driver = Driver(address, keep_alive=keep_alive, timeout=timeout)
    started, cpu = time.perf_counter(), time.process_time()
    driver.run(plans, max_time, before_close)
    return Run(
        outcomes=tuple(driver.outcomes),
        wall=time.perf_counter() - started,
        cpu=time.process_time() - cpu,
        held=driver.held,
    )
