"""A machine that does other things too: a stream alone, and one beside a busy process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import attrs

from benchmarks.load import Load
from benchmarks.scenarios import Settings
from benchmarks.stats import Metric, Sample
from benchmarks.targets import Target

#: What keeps a core busy, as a build or a page in a browser does.
_LOOP = "while True: pass"


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep that many processes busy for the length of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@attrs.frozen
class Beside:
    """A stream while the machine is quiet, and another from the moment others are busy.

    Before the first, one is not measured: a server may have to find out that the others are gone.
    """

    settings: Settings
    others: int = 1
    max_tokens: int = 256

    metrics = (
        Metric("busy / quiet", "", more_is_better=True, digits=2),
        Metric("tokens/s", "", more_is_better=True),
        Metric("tokens/s quiet", "", more_is_better=True),
        Metric("itl p50", "ms", digits=2),
        Metric("itl p99", "ms"),
    )

    @property
    def name(self) -> str:
        """Such as "1 stream beside 1 busy process"."""
        return f"1 stream beside {self.others} busy process{'es' if self.others > 1 else ''}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings = self.settings
        load = Load(
            clients=1,
            shape=settings.with_tokens(self.max_tokens),
            timeout=settings.timeout,
            max_time=settings.max_time,
        )
        load.measure(target, f"{seed} first")
        quiet = load.measure(target, f"{seed} quiet")
        with busy(self.others):
            sample = load.measure(target, f"{seed} busy")
        numbers = dict(sample.numbers)
        if "tokens/s" in quiet.numbers:
            numbers["tokens/s quiet"] = quiet.numbers["tokens/s"]
        if "tokens/s" in numbers and "tokens/s quiet" in numbers:
            numbers["busy / quiet"] = numbers["tokens/s"] / numbers["tokens/s quiet"]
        return attrs.evolve(
            sample,
            numbers=numbers,
            requests=sample.requests + quiet.requests,
            failed=sample.failed + quiet.failed,
            errors=(*quiet.errors, *sample.errors),
            notes=(*quiet.notes, *sample.notes),
        )
