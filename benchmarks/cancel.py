"""A client that goes away: how long until its slot is free?

The connection is closed in the midst of prefill or decode, and a second one asks ``/slots`` until
no slot is busy. One step of the engine is allowed for: it is measured first, without cancelling.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import selectors
import socket
import statistics
import time

import attrs

from benchmarks.http1 import ProtocolError, ResponseReader, payloads
from benchmarks.plan import Address, Outcome, Plan, Request
from benchmarks.scenarios import Settings
from benchmarks.stats import Metric, Sample
from benchmarks.targets import Target, TargetError
from benchmarks.wire import understand
from trioserve.bench.stats import percentile

PHASES = ("prefill", "decode")


class Slots:
    """A kept connection that asks whether a slot is busy."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target = target
        self.path = target.address.prefix + "/slots"
        address = target.address
        self.connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)

    def busy(self) -> bool:
        """Ask once.

        Raises:
            TargetError: there is no answer, or another one.
        """
        try:
            self.connection.request("GET", self.path)
            response = self.connection.getresponse()
            found = json.loads(response.read())
            if response.status != 200:
                raise TargetError(f"{self.target.name}: /slots answered {response.status}")
            return any(slot["is_processing"] for slot in found)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise TargetError(f"{self.target.name}: /slots: {error!r}") from error

    def wait_idle(self, timeout: float) -> float:
        """Ask until no slot is busy, and return when the answer came.

        Raises:
            TargetError: a slot stays busy for `timeout` seconds.
        """
        deadline = time.perf_counter() + timeout
        while self.busy():
            if time.perf_counter() > deadline:
                raise TargetError(f"{self.target.name}: a slot is busy after {timeout:g} s")
        return time.perf_counter()


def step_of(outcome: Outcome, phase: str) -> float:
    """Return how long one step takes, in seconds, from an answer with events of progress.

    In prefill it is the longest time between two events up to the first with output, from the
    sending on; in decode the time for each token, because an event may carry several.

    Raises:
        ValueError: the answer is an error, or too short.
    """
    stream = understand(outcome)
    if stream.error:
        raise ValueError(stream.error)
    if phase == "decode":
        if not stream.gaps:
            raise ValueError("the answer has one event only")
        return (stream.at[-1] - stream.at[0]) / (stream.tokens - 1)
    first = outcome.sent + stream.ttft
    until = [outcome.sent, *(when for when in outcome.times if when <= first)]
    return max(after - before for before, after in itertools.pairwise(until))


@attrs.frozen
class Cancel:
    """One stream after the other, each cut off at a random moment of prefill, or of decode."""

    settings: Settings
    phase: str = attrs.field(validator=attrs.validators.in_(PHASES))
    count: int = 20
    prompt_tokens: int = 1500  # of those that are cut off in prefill
    max_seconds: float = 20.0  # no new sample after that
    clear_after: float = 30.0  # seconds a slot may stay busy

    metrics = (
        Metric("p99 beyond one step", "ms", digits=2),
        Metric("slot free p50", "ms", digits=2),
        Metric("slot free p99", "ms", digits=2),
        Metric("one step", "ms", digits=2),
        Metric("cancelled", "", digits=0),
    )

    @property
    def name(self) -> str:
        """Such as "cancel in decode"."""
        return f"cancel in {self.phase}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once. The numbers come from what was cancelled in the phase that is meant."""
        started = time.perf_counter()
        slots = Slots(target, self.clear_after)
        try:
            whole: list[Outcome] = []
            while len(whole) < 3:
                plan = Plan(requests=[self._request(f"{seed} whole {len(whole)}")])
                whole += self.settings.run(target, [plan]).outcomes
                if time.perf_counter() - started > self.max_seconds / 3:
                    break
            step = statistics.median(step_of(outcome, self.phase) for outcome in whole)
            prefill = min(understand(outcome).ttft for outcome in whole)
            rng = random.Random(seed)
            times: list[float] = []
            tries = 0
            while tries < self.count and time.perf_counter() - started < self.max_seconds:
                slots.wait_idle(self.clear_after)
                wait = max(0.01, rng.uniform(0.1, 0.7) * prefill)
                events = 0 if self.phase == "prefill" else rng.randrange(3, 20)
                request = self._request(f"{seed} {tries}")
                closed = cut(target.address, request, wait, events, self.clear_after)
                tries += 1
                if closed is not None:
                    times.append(slots.wait_idle(self.clear_after) - closed)
        except (ValueError, OSError, ProtocolError, TargetError) as error:
            return Sample(numbers={}, requests=1, failed=1, errors=(str(error),))
        finally:
            slots.connection.close()
        return self._sample(step * 1e3, [time * 1e3 for time in times], tries)

    def _request(self, seed: str) -> Request:
        decode = self.phase == "decode"
        shape = attrs.evolve(
            self.settings.with_tokens(64 if decode else 2),
            api="completion",
            more={"return_progress": True},
        )
        return shape.request(self.settings.prompt(16 if decode else self.prompt_tokens, seed))

    def _sample(self, step: float, times: list[float], tries: int) -> Sample:
        notes = []
        if tries < self.count:
            notes.append(f"{tries} of {self.count} requests: the time was up")
        if len(times) < tries:
            notes.append(f"{tries - len(times)} had left the phase when they were to be cut off")
        numbers = {"one step": step, "cancelled": float(len(times))}
        if times:
            numbers["slot free p50"] = percentile(times, 0.5)
            numbers["slot free p99"] = percentile(times, 0.99)
            numbers["p99 beyond one step"] = numbers["slot free p99"] - step
        return Sample(numbers=numbers, requests=tries, notes=tuple(notes))


def cut(
    address: Address, request: Request, wait: float, events: int, timeout: float
) -> float | None:
    """Send a request and close its connection; return when, or None where it was too late.

    With `events` above 0 it is closed after that many events with data; else `wait` seconds after
    it was sent, if no output has come.

    Raises:
        OSError: no connection, or nothing came for `timeout` seconds.
        ValueError: the answer is an error, or too few events came.
        ProtocolError: the answer is no HTTP.
    """
    with (
        socket.create_connection((address.host, address.port), timeout) as sock,
        selectors.DefaultSelector() as selector,
    ):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(request.encode(address))
        end = time.perf_counter() + (timeout if events else wait)
        selector.register(sock, selectors.EVENT_READ)
        reader = ResponseReader()
        while (left := end - time.perf_counter()) > 0:
            if not selector.select(left):
                continue
            data = sock.recv(65536)
            if not data or reader.feed(data, time.perf_counter()):
                if reader.status not in (0, 200):
                    raise ValueError(f"HTTP {reader.status}: {reader.body[:200]!r}")
                return None
            if events and len(reader.times) >= events:
                break
        if events and len(reader.times) < events:
            raise ValueError(f"{len(reader.times)} events came in {timeout:g} s")
        if not events and any(_has_text(data) for data in payloads(reader.body)):
            return None
        return time.perf_counter()  # the block closes the connection


def _has_text(data: bytes) -> bool:
    event = json.loads(data)
    return isinstance(event, dict) and bool(event.get("content"))
