"""A client that goes away, and the time until its slot is free.

    python -m benchmarks.cancel --model 110m.gguf --count 200

The connection is closed at a random moment of prefill, of decode or of embeddings, and a second one
asks ``/slots`` until no slot is busy. Run as a program, it measures trioserve in all of them, with
drafts and through the router, too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks import report
from benchmarks.driver import Address, Plan, Request
from benchmarks.http1 import ProtocolError, ResponseReader, payloads
from benchmarks.report import bounded, progress
from benchmarks.scenarios import Settings
from benchmarks.servers import Flags, Target, TargetError, exit_on_sigterm, running, trioserve
from benchmarks.stats import Metric, Sample
from trioserve.bench.stats import percentile

PHASES = ("prefill", "decode")
WHOLE = "a whole answer"  # one that is not streamed


class Slots:
    """A kept connection that asks whether a slot is busy."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target = target
        address = target.address
        self.connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)

    def busy(self) -> bool:
        """Ask once.

        Raises:
            TargetError: there is no answer, or another one.
        """
        try:
            self.connection.request("GET", "/slots")
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


@attrs.frozen
class Cancel:
    """One request after the other, each cut off at a random moment of a phase.

    That is prefill, decode, an answer that is not streamed, or the embeddings of 64 texts.
    """

    settings: Settings
    phase: str = attrs.field(validator=attrs.validators.in_((*PHASES, WHOLE, "embeddings")))
    count: int = 20
    prompt_tokens: int = 1500  # of those that are cut off in prefill
    max_seconds: float = 20.0  # no new sample after that
    clear_after: float = 30.0  # seconds a slot may stay busy

    metrics = (
        Metric("slot free p50", "ms", digits=2),
        Metric("slot free p99", "ms", digits=2),
        Metric("slot free max", "ms", digits=2),
        Metric("cancelled", "", digits=0),
    )

    @property
    def name(self) -> str:
        """Such as "cancel in decode"."""
        tokens = f" of {self.prompt_tokens} tokens" if self.phase == "prefill" else ""
        return f"cancel in {self.phase}{tokens}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once. The numbers come from what was cancelled in the phase that is meant."""
        slots = Slots(target, self.clear_after)
        try:
            plan = Plan(requests=[self._request(f"{seed} whole {i}") for i in range(3)])
            outcomes = self.settings.run(target, [plan]).outcomes
            for one in outcomes:
                if one.error or one.status != 200:
                    raise ValueError(one.error or f"HTTP {one.status}: {one.body[:200]!r}")
            whole = min(one.ended - one.sent for one in outcomes)
            rng, started = random.Random(seed), time.perf_counter()
            times: list[float] = []
            tries = 0
            while len(times) < self.count and time.perf_counter() - started < self.max_seconds:
                slots.wait_idle(self.clear_after)
                wait = rng.uniform(0.02, 0.7) * whole
                events = rng.randrange(3, 20) if self.phase == "decode" else 0
                request = self._request(f"{seed} {tries}")
                closed = cut(target.address, request, wait, events, self.clear_after)
                tries += 1
                if closed is not None:
                    times.append(slots.wait_idle(self.clear_after) - closed)
        except (ValueError, OSError, ProtocolError, TargetError) as error:
            return Sample(numbers={}, requests=1, failed=1, errors=(str(error),))
        finally:
            slots.connection.close()
        return self._sample([time * 1e3 for time in times], tries)

    def _request(self, seed: str) -> Request:
        settings = self.settings
        if self.phase == "embeddings":
            texts = [settings.prompt(45, f"{seed} {number}") for number in range(64)]
            body = {"model": settings.shape.model, "input": texts}
            return Request("POST", "/v1/embeddings", json.dumps(body).encode())
        is_short = self.phase in ("decode", WHOLE)
        shape = settings.having(max_tokens=64 if is_short else 2).shape
        more = {"model": shape.model, "stream": self.phase != WHOLE}
        shape = attrs.evolve(shape, api="completion", more=more)
        return shape.request(settings.prompt(16 if is_short else self.prompt_tokens, seed))

    def _sample(self, times: list[float], tries: int) -> Sample:
        notes = []
        if len(times) < self.count:
            notes.append(f"{len(times)} of {self.count}: the time was up")
        if len(times) < tries:
            notes.append(f"{tries - len(times)} had left the phase when they were to be cut off")
        numbers = {"cancelled": float(len(times))}
        if times:
            numbers["slot free p50"] = percentile(times, 0.5)
            numbers["slot free p99"] = percentile(times, 0.99)
            numbers["slot free max"] = max(times)
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
        ProtocolError: the answer is not HTTP.
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


#: Servers, by a name: the flags, and the phases that are cut off.
_SERVERS = {
    "plain": ("", PHASES),
    "drafts": ("--spec-type ngram-simple", PHASES),
    "embeddings": ("--embeddings --pooling mean", ("embeddings",)),
    "router": ("", (*PHASES, WHOLE)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a request failed or a p99 is above --limit-ms."""
    parser = report.arguments("cancel", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--count", type=bounded(1, 10_000), default=200, help="cancels in each phase")
    add("--prompt-tokens", type=int, default=1500, help="of the cancels in prefill")
    add("--max-seconds", type=float, default=60.0, help="for each phase")
    add("--limit-ms", type=float, default=50.0)
    add("--servers", default=",".join(_SERVERS), help="with commas")
    options = parser.parse_args(argv)
    exit_on_sigterm()
    columns = [metric.name for metric in Cancel.metrics]
    rows: list[list[str]] = [["server", "phase", *columns, "notes"]]
    failed = False
    for server in options.servers.split(","):
        for sample, phase in _measured(options, server):
            failed = failed or sample.numbers.get("slot free p99", math.inf) > options.limit_ms
            shown = [f"{sample.numbers.get(name, math.nan):.1f}" for name in columns]
            rows.append([server, phase, *shown, "; ".join((*sample.errors, *sample.notes))])
            progress(quiet=False)("  ".join(rows[-1]))
    print(report.markdown(rows))
    return int(failed)


def _measured(options: argparse.Namespace, server: str) -> Iterator[tuple[Sample, str]]:
    flags, phases = _SERVERS[server]
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = Path(scratch), options.model.resolve()
        if server == "router":
            flags, model = f"--models-dir {models_folder(folder, model)}", None
        with running(trioserve(flags), Flags(model=model), folder / "log") as target:
            settings = Settings().fit(target)
            for phase in phases:
                scenario = Cancel(
                    settings, phase, options.count, options.prompt_tokens, options.max_seconds
                )
                yield scenario.measure(target, ""), phase


def models_folder(folder: Path, model: Path) -> Path:
    """Make a folder of models for a router, with one in it that is called "benchmark"."""
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    link = models / "benchmark.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(model.resolve())
    return models


if __name__ == "__main__":
    sys.exit(main())
