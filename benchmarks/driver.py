"""Many clients on one selector: each sends its requests one after the other and notes times.

One thread, no task for a client, no parsing of bodies: the generator must cost far less than what
it measures. `wire` says what requests mean, and `stats` what the times do.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from benchmarks.http1 import ProtocolError, ResponseReader

RECV_SIZE = 64 * 1024
MAX_CLIENTS = 4096
#: Seconds between two checks for requests that have taken too long.
_CHECK_EVERY = 0.25


@attrs.frozen
class Address:
    """The address of a server. `host` is an IPv4 address."""

    host: str
    port: int


@attrs.frozen
class Request:
    """One HTTP request. `body` is JSON, or empty for none."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self, address: Address) -> bytes:
        """Return the bytes of the request."""
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            f"Host: {address.host}:{address.port}",
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
    status: int = 0
    error: str = ""
    sse: bool = False
    times: tuple[float, ...] = ()
    body: bytes = b""


@attrs.frozen(kw_only=True)
class Plan:
    """The requests of one client, one after the other."""

    requests: Sequence[Request] = ()
    delay: float = 0.0  # seconds after the beginning of the run
    after_events: int = 0  # begin when plans without this number have received this many
    #: Gets each whole answer, and returns the request that comes next, before the others.
    then: Callable[[Outcome], Request | None] | None = None
    pause: float = 0.0  # seconds between two requests
    hold: bool = False  # only open the connection, until the end of the run


@attrs.frozen(kw_only=True)
class Run:
    """The outcomes of a run, in the order in which they ended, and what the generator used."""

    outcomes: tuple[Outcome, ...]
    wall: float
    cpu: float  # seconds of CPU that this process used meanwhile

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
        self.requests: Iterator[Request] = iter(plan.requests)
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
        if self.request is None:
            self.finish()
            return
        self.sent = time.perf_counter()
        self._send()

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
        if error or not reader.keep_alive:
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
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
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
        self.unsent = self.request.encode(driver.address)
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

    def give_up(self, now: float, error: str, *, over: bool = False) -> None:
        """End the running request with an error, and the plan where the run is over."""
        if over:
            self.requests, self.follow = iter(()), None
        self._complete(now, error)


class Driver:
    """Runs plans against one server. Use `run`."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self.outcomes: list[Outcome] = []
        self.someone_waits = False
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self._clients: list[_Client] = []
        self._waiting: list[_Client] = []
        self._running = 0

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
        """Count a client that is through."""
        self._running -= 1
        if self.someone_waits:
            self.count_events()

    def count_events(self) -> None:
        """Start the clients that wait until the others have received enough events."""
        leaders = [client for client in self._clients if client not in self._waiting]
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
        self._waiting = [client for client in self._clients if client.plan.after_events]
        self.someone_waits = bool(self._waiting)
        for client in self._clients:
            if not client.plan.after_events:
                self.call_at(started + client.plan.delay, client.begin)
        now, check_at = started, started + _CHECK_EVERY
        try:
            while self._running:
                now = self._step(check_at)
                if now - started >= max_time:
                    self._end(now, f"the run took longer than {max_time:g} s")
                    break
                if now >= check_at:
                    check_at = now + _CHECK_EVERY
                    self._give_up_late(now)
            before_close()
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

    def _give_up_late(self, now: float) -> None:
        for client in self._clients:
            if client.request is not None and now - client.sent > self.timeout:
                client.give_up(now, f"no end after {self.timeout:g} s")

    def _end(self, now: float, error: str) -> None:
        self._timers.clear()
        for client in self._clients:
            if client.request is not None:
                client.give_up(now, error, over=True)


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
    timeout: float = 120.0,
    max_time: float = 600.0,
    before_close: Callable[[], None] = lambda: None,
) -> Run:
    """Work through the plans and return what happened.

    Each request gets `timeout` seconds, the whole run `max_time`. `before_close` is called at
    the end, when held connections are still open. Requests that fail are outcomes with an `error`,
    never exceptions. All connections are closed on return.

    Raises:
        ValueError: there are no plans, or more than `MAX_CLIENTS`.
    """
    plans = tuple(plans)
    if not 0 < len(plans) <= MAX_CLIENTS:
        raise ValueError(f"{len(plans)} clients; it must be between 1 and {MAX_CLIENTS}")
    _allow_descriptors(len(plans))
    driver = Driver(address, timeout)
    started, cpu = time.perf_counter(), time.process_time()
    driver.run(plans, max_time, before_close)
    return Run(
        outcomes=tuple(driver.outcomes),
        wall=time.perf_counter() - started,
        cpu=time.process_time() - cpu,
    )
