"""The plan that the driver carries out, and the events that it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

#: The error of a background request that was running when the run ended.
UNFINISHED = "unfinished"

#: The error of a request that was given up as planned.
CANCELLED = "cancelled"


@attrs.frozen
class Address:
    """Where a server listens. `host` is an IP address; `prefix` goes before each path."""

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
    """What became of one request. Times are of `time.perf_counter`.

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
    """What one client does.

    The client begins `delay` seconds after the run, or, with `after_events` above 0, once every
    plan that waits for nothing has received that many events. Between requests it pauses. With
    `then`, each whole answer of status 200 is shown to it, and it gives the request that follows
    at once (None: there is none), before the rest of `requests`. A
    background plan repeats until the others are done, and then gives up what it is doing, which
    makes an outcome with the error `UNFINISHED`. With
    `hold`, the connection is opened and nothing is sent on it until the run ends.
    """

    requests: Sequence[Request] = ()
    delay: float = 0.0
    after_events: int = 0
    then: Callable[[Outcome], Request | None] | None = None
    pause: float = 0.0
    background: bool = False
    hold: bool = False


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
