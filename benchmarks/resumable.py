"""What a stream that can be resumed costs, beside a plain one.

    python -m benchmarks.resumable --model model.gguf

One server, asked for both kinds in turn. `loop cpu/event` is the CPU of the thread that has the
event loop, for each event of a stream: all that the two differ in. `cpu/event` is that of the whole
process, with what the model costs. Then comes the memory of many such streams at once: how much the
process has grown when all have ended, beside the bytes that the server says it keeps.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from benchmarks import report
from benchmarks.driver import run
from benchmarks.harness import Flags, running, trioserve, usage
from benchmarks.load import Load, bounded, interleave, progress, warm_up
from benchmarks.plan import Plan
from benchmarks.stats import Metric, Sample, ratio, sample_of, worst_failures
from benchmarks.targets import Target, TargetError, ask
from benchmarks.wire import Shape
from trioserve.models import BUNDLED

#: At most, of the CPU that a plain stream costs.
LIMIT = 1.2

METRICS = (
    Metric("loop cpu/event", "µs", digits=1),
    Metric("cpu/event", "µs", digits=1),
    Metric("events", ""),
)


def thread_cpu(pid: int, thread: int) -> float:
    """Return the seconds of CPU that a thread has used. The first one has the event loop."""
    text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="utf-8")
    return int(text.split()[0]) / 1e9


def process_cpu(pid: int) -> float:
    """Return the seconds of CPU that the threads of a process have used, of those that live."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(thread_cpu(pid, int(each.name)) for each in threads)


@attrs.frozen
class Streams:
    """Streams of one kind. `named` are those that can be resumed."""

    load: Load

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once. The name of the target says which kind."""
        assert target.pid is not None
        plans = self.load.plans(seed)
        if target.name == "resumable":
            plans = [_named(plan, f"{seed} {n}") for n, plan in enumerate(plans)]
        loop, whole = thread_cpu(target.pid, target.pid), process_cpu(target.pid)
        result = run(target.address, plans, timeout=self.load.timeout, max_time=self.load.max_time)
        loop = thread_cpu(target.pid, target.pid) - loop
        whole = process_cpu(target.pid) - whole
        sample = sample_of(result, planned=self.load.clients * self.load.requests)
        if result.events:
            sample.numbers["events"] = float(result.events)
            sample.numbers["loop cpu/event"] = loop / result.events * 1e6
            sample.numbers["cpu/event"] = whole / result.events * 1e6
        return sample


def _named(plan: Plan, name: str, *more: tuple[str, str]) -> Plan:
    requests = [
        attrs.evolve(
            each, headers=(*each.headers, ("X-Conversation-Id", f"{name} {number}"), *more)
        )
        for number, each in enumerate(plan.requests)
    ]
    return attrs.evolve(plan, requests=requests)


def measure_memory(target: Target, load: Load, count: int) -> tuple[float, float]:
    """Begin many streams without readers, and wait for their ends.

    Returns by how many MiB the process has grown, and how many MiB it says that it keeps.

    Raises:
        TargetError: a stream is refused, or they do not end.
    """
    before = _memory(target)
    plans = attrs.evolve(load, clients=count, requests=1).plans("memory")
    asynchronous = ("Prefer", "respond-async, wait=0")
    result = run(
        target.address,
        [_named(plan, f"memory {n}", asynchronous) for n, plan in enumerate(plans)],
        timeout=load.timeout,
        max_time=load.max_time,
    )
    if refused := [each.status for each in result.outcomes if each.status != 202]:
        raise TargetError(f"{len(refused)} of {count} streams were refused: {refused[0]}")
    deadline = time.monotonic() + load.max_time
    while _gauge(target, 'streams{state="running"}'):
        if time.monotonic() > deadline:
            raise TargetError("the streams do not end")
        time.sleep(0.5)
    return (_memory(target) - before) / 2**20, _gauge(target, "stream_bytes") / 2**20


def _memory(target: Target) -> int:
    assert target.pid is not None
    used = usage(target.pid)
    if used is None:
        raise TargetError("the memory of the server is not known on this system")
    return used.memory


def _gauge(target: Target, name: str) -> float:
    found = re.search(rf"^trioserve:{re.escape(name)} (.*)$", ask(target, "GET", "/metrics"), re.M)
    if found is None:
        raise TargetError(f"/metrics has no {name}")
    return float(found[1])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resumable", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED, help="the model; by default the bundled one")
    add("-t", "--threads", type=bounded(1, 1024), default=1)
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--clients", type=bounded(1, 1024), default=8)
    add("--requests", type=bounded(1, 10_000), default=2, help="for each client")
    add("--max-tokens", type=bounded(1, 100_000), default=200, help="tokens of each output")
    add("--rounds", type=bounded(1, 1000), default=8, help="runs of each kind")
    add("--streams", type=bounded(0, 4096), default=500, help="at once, for their memory")
    add("--json", type=Path, default=None, help="write all samples to this file")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def measure_all(options: argparse.Namespace, target: Target) -> tuple[dict[str, object], bool]:
    """Measure everything and print it. Returns the samples, and whether the limit is kept.

    Raises:
        TargetError: the server does not answer, or refuses.
    """
    load = Load(
        clients=options.clients,
        requests=options.requests,
        prompt_words=8,
        shape=Shape(max_tokens=options.max_tokens),
    )
    kinds = [attrs.evolve(target, name=name) for name in ("resumable", "plain")]
    warm_up(kinds, attrs.evolve(load, clients=1).measure)
    title = f"{load.clients} streams"
    note = progress(options.quiet)
    samples = interleave(kinds, options.rounds, Streams(load).measure, title, note)
    if worst_failures(samples):
        raise TargetError("requests failed")
    print(report.table(title, METRICS, samples), flush=True)
    found = ratio(samples["resumable"], samples["plain"], "loop cpu/event")
    is_kept = found is not None and found.median <= LIMIT
    results: dict[str, object] = {title: samples}
    if options.streams:
        grown, kept = measure_memory(target, load, options.streams)
        results["memory"] = {"streams": options.streams, "grown": grown, "kept": kept}
        print(f"{options.streams} streams at once: {kept:.1f} MiB kept, {grown:.1f} MiB grown")
    return results, is_kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when the limit is not kept, 2 when nothing was measured."""
    options = parse(argv)
    more = (
        "--stream-interval-ms",
        "0",
        "--metrics",
        "--stream-sessions",
        "4096",
        "--cache-ram",
        "0",
    )
    flags = Flags(model=options.model, threads=options.threads, slots=options.slots, more=more)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        try:
            with running(trioserve(), flags, Path(folder) / "log") as target:
                results, is_kept = measure_all(options, target)
        except TargetError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.json is not None:
        report.write_json(options.json, {"options": report.plain(options), "results": results})
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
