"""What a step costs in Python: the engine, and a whole server, on a model that takes 3 ms.

    python -m benchmarks.steps

In place of a model there is a script, and in place of a GPU a pause: a decode takes 3 ms, whatever
is in it, and leaves the GIL to others. A sampler gives its token in one call of C. The rest of
a step is the engine's own Python. Nothing goes over a socket; `load` measures that.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
import timeit
from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import Any

import attrs
import trio

from benchmarks import report
from benchmarks.load import bounded, counts
from trioserve import Config
from trioserve.engine import DecodeMaximal, Engine
from trioserve.llama.batch import LlamaBatch
from trioserve.server.server import Server
from trioserve.testing import ScriptedBackend, scripted
from trioserve.testing.vocab import EOS, ByteVocab
from trioserve.types import Chunk, GenerationParams, Prompt, SamplingParams, Task

#: Steps at the beginning that are left out: prompts, and what is done for the first time.
WARM_UP = 30
N_BATCH = 2048


class Words(ByteVocab):
    """A vocabulary whose tokens are as long as those of models."""

    pieces = (*(f" word{token}".encode() for token in range(256)), b"")
    names = (*pieces[:256], b"<eos>")


@attrs.frozen
class Device:
    """Takes its time for a decode, while other threads run.

    Args:
        seconds: how long.
        polls: whether the thread polls until it is over, as a driver for a GPU does, or sleeps.
            After a sleep the caches of the CPU are cold, and whatever comes then takes longer.
    """

    seconds: float
    polls: bool = False
    _rounds: int = attrs.field(init=False)

    @_rounds.default
    def _calibrate(self) -> int:
        if not self.polls:
            return 0
        _compute(1000)
        work = partial(_compute, 10_000)
        taken = min(timeit.repeat(work, timer=time.thread_time, number=1))
        return max(1, int(10_000 * self.seconds / taken))

    def decode(self) -> None:
        """Take the time."""
        if self.polls:
            _compute(self._rounds)
        else:
            time.sleep(self.seconds)


def _compute(rounds: int) -> None:
    """Keep this thread busy in C, without the GIL."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)


class QuickSampler:
    """Says the same again and again, in one call that is no Python."""

    __slots__ = ("attach", "close", "detach", "sample")

    def __init__(self, first: int) -> None:
        self.sample = bytes((first + row) % EOS for row in range(N_BATCH)).__getitem__
        self.attach = self.close = self.detach = int  # do nothing


class Metronome(ScriptedBackend):
    """A model on a device: a decode takes its time there, and leaves the CPU to others.

    Args:
        n_slots: requests at the same time.
        device: what decodes.
        n_steps: decodes to measure, after some to warm up.
    """

    def __init__(self, n_slots: int, device: Device, n_steps: int) -> None:
        room = N_BATCH + WARM_UP + n_steps
        super().__init__(n_slots=n_slots, n_ctx=n_slots * room, n_ctx_seq=room, n_batch=N_BATCH)
        self.vocab = Words()
        self._rows = LlamaBatch(N_BATCH, n_vocab=self.vocab.n_tokens, n_seqs=n_slots)
        self.batch: Any = self._rows
        self.unified = True
        self._device = device
        #: Of each decode: how many tokens it had, when it began, and the CPU time that this thread
        #: had used when it began and when it ended.
        self.seen: list[tuple[int, float, float, float]] = []

    def decode(self) -> None:
        began, before = time.perf_counter(), time.thread_time()
        self._device.decode()
        self.seen.append((len(self._rows), began, before, time.thread_time()))

    def sampler(self, params: object, prompt: Sequence[int], constraint: object = None) -> Any:
        return QuickSampler(prompt[0])

    def remove(self, seq: int, start: int) -> bool:
        return True

    def steps(self) -> list[Step]:
        """Return the steps that decoded a token of each slot."""
        found = []
        for (n_now, began, _, left), (n_next, ends, entered, _) in zip(
            self.seen[WARM_UP:], self.seen[WARM_UP + 1 :], strict=False
        ):
            if n_now == n_next == self.n_slots:
                found.append(Step(ends - began, entered - left))
        return found


@attrs.frozen
class Step:
    """Seconds from one decode to the next, and those that the thread computed in between."""

    wall: float
    python: float


@attrs.frozen(kw_only=True)
class Cost:
    """What steps cost: the median of each, in seconds."""

    n_slots: int
    step: float
    python: float
    loop: float | None = None  # CPU time of the event loop's thread, on average
    tokens_per_event: float | None = None

    def row(self, name: str, device: Device) -> list[str]:
        """Return a line of the table."""
        python = self.python
        return [
            f"{name}, {self.n_slots} slots",
            f"{self.n_slots / self.step:,.0f}",
            f"{self.step * 1e3:.2f}",
            f"{python * 1e6:,.0f}",
            f"{python / self.n_slots * 1e6:.2f}",
            f"{python / device.seconds:.1%}" if device.seconds else "-",
            "-" if self.loop is None else f"{self.loop * 1e6:,.0f}",
            "-" if self.tokens_per_event is None else f"{self.tokens_per_event:.1f}",
        ]


HEAD = [
    "",
    "tokens/s",
    "step, ms",
    "Python, us",
    "us/slot",
    "share",
    "event loop, us",
    "tokens/event",
]


def cost_of(backend: Metronome, **more: float) -> Cost:
    """Sum up what a backend has seen.

    Raises:
        RuntimeError: the slots were never all in decode.
    """
    steps = backend.steps()
    if not steps:
        raise RuntimeError("no two steps had a token of every slot")
    return Cost(
        n_slots=backend.n_slots,
        step=statistics.median(step.wall for step in steps),
        python=statistics.median(step.python for step in steps),
        **more,
    )


def params_for(n_steps: int) -> GenerationParams:
    """Ask for as many tokens as there are steps."""
    return GenerationParams(
        max_tokens=WARM_UP + n_steps, cache_prompt=False, sampling=SamplingParams(ignore_eos=True)
    )


def prompt_of(slot: int) -> tuple[int, ...]:
    """Make a prompt that begins like no other."""
    return (slot % 251, slot // 251, *range(14))


def measure_engine(n_slots: int, device: Device, n_steps: int) -> Cost:
    """Run an engine whose events are read only at the end."""
    backend = Metronome(n_slots, device, n_steps)
    engine = Engine(backend, DecodeMaximal(), lambda: None)
    params = params_for(n_steps)
    for slot in range(n_slots):
        engine.submit(Task(slot, Prompt(prompt_of(slot)), params))
    thread = Thread(target=engine.run)
    thread.start()
    while len(backend.seen) < WARM_UP + n_steps:
        time.sleep(0.05)
        engine.take()
    engine.stop()
    thread.join()
    return cost_of(backend)


async def measure_server(n_slots: int, device: Device, n_steps: int) -> Cost:
    """Run a server, and read the stream of every request in a separate task."""
    backend = Metronome(n_slots, device, n_steps)
    params, n_events, n_tokens = params_for(n_steps), 0, 0

    async def read(slot: int) -> None:
        nonlocal n_events, n_tokens
        opened = server.stream_all([prompt_of(slot)], params)
        async with opened as (stream,):
            async for event in stream:
                if isinstance(event, Chunk):
                    n_events += 1
                    n_tokens += len(event.tokens)

    config = Config(parallel=n_slots, max_queue=n_slots)
    async with Server(config, load=scripted(backend)) as server:
        server.observers.clear()  # no line in a log for each request
        before = time.thread_time()
        async with trio.open_nursery() as nursery:
            for slot in range(n_slots):
                nursery.start_soon(read, slot)
        loop = (time.thread_time() - before) / len(backend.seen)
    return cost_of(backend, loop=loop, tokens_per_event=n_tokens / n_events)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--slots", type=counts, default=[1, 8, 64, 256], help="with commas")
    add("--steps", type=bounded(10, 100_000), default=300, help="measured in each run")
    add("--step-ms", type=float, default=3.0, help="what a decode takes")
    add("--poll", action="store_true", help="wait for it as for a GPU: by polling, not asleep")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parse(argv)
    device = Device(options.step_ms / 1e3, options.poll)
    rows = [HEAD]
    for n_slots in options.slots:
        rows.append(measure_engine(n_slots, device, options.steps).row("engine", device))
    for n_slots in options.slots:
        served = trio.run(partial(measure_server, n_slots, device, options.steps))
        rows.append(served.row("server", device))
    print(report.align(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
