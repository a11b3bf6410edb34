"""What the way through Ray Serve costs, beside a server with the same flags.

    python -m benchmarks.ray_cost --model model.gguf

An application with one ingress and one replica, and a server alone, run side by side and are
measured in turn. `cpu/event` is the CPU of all processes of each, for each event of a stream:
those of Ray, and the server with its model. It needs `pip install -e '.[ray]'`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import attrs

from benchmarks import report
from benchmarks.driver import run
from benchmarks.harness import Command, Flags, all_running, trioserve, usage
from benchmarks.load import Load, bounded, counts, interleave, progress, warm_up
from benchmarks.stats import STREAM_METRICS, Metric, Sample, sample_of, worst_failures
from benchmarks.targets import Target, TargetError
from benchmarks.wire import Shape
from trioserve.models import BUNDLED

#: The name of the model in the application.
NAME = "model"

#: The first argument of the process that runs the application.
_SERVE = "serve"

#: A loopback address that Ray takes literally; for 127.0.0.1 it puts that of the network in places.
_HOST = "127.0.0.2"


@attrs.frozen
class Streamed:
    """Streams, and the CPU of all that is behind an address."""

    load: Load

    metrics = (*STREAM_METRICS, Metric("cpu/event", "µs", digits=0), Metric("tokens/event", ""))

    @property
    def name(self) -> str:
        """Such as "8 streams"."""
        return f"{self.load.clients} streams"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        assert target.pid is not None
        load = self.load
        before = usage(target.pid)
        result = run(target.address, load.plans(seed), timeout=load.timeout, max_time=load.max_time)
        after = usage(target.pid)
        sample = sample_of(result, planned=load.clients * load.requests)
        if result.events and before is not None and after is not None:
            sample.numbers["cpu/event"] = (after.cpu - before.cpu) / result.events * 1e6
        return sample


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ray_cost", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED, help="the model; by default the bundled one")
    add("-t", "--threads", type=bounded(1, 1024), default=None)
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--clients", type=counts, default=[1, 8])
    add("--requests", type=bounded(1, 10_000), default=4, help="for each client")
    add("--max-tokens", type=bounded(1, 100_000), default=200, help="tokens of each output")
    add("--rounds", type=bounded(1, 1000), default=5, help="runs of each server")
    add("--json", type=Path, default=None, help="write all samples to this file")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def measure_all(options: argparse.Namespace, targets: Sequence[Target]) -> dict[str, object]:
    """Measure everything, print the tables, and return the samples.

    Raises:
        TargetError: a server does not answer.
    """
    shape = Shape(max_tokens=options.max_tokens, model=NAME)
    load = Load(clients=1, requests=options.requests, shape=shape)
    warm_up(targets, load, 4)
    results: dict[str, object] = {}
    for clients in options.clients:
        scenario = Streamed(attrs.evolve(load, clients=clients))
        note = progress(options.quiet)
        samples = interleave(targets, options.rounds, scenario.measure, scenario.name, note)
        results[scenario.name] = samples
        print(report.table(scenario.name, scenario.metrics, samples), flush=True)
        if worst_failures(samples):
            raise TargetError(f"{scenario.name}: requests failed")
    return results


def serve(argv: Sequence[str]) -> int:
    """Run the application with the flags of a server, until SIGTERM."""
    import ray
    from ray import serve as ray_serve

    from trioserve.ray import build

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    address, flags = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        ray.init(
            _node_ip_address=_HOST,
            include_dashboard=False,
            num_cpus=16,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
        )
        try:
            options = {"host": address.host, "port": address.port}
            ray_serve.start(proxy_location="HeadOnly", http_options=options)
            ray_serve.run(build({NAME: flags}, replicas=1, ingresses=1), route_prefix="/")
            while True:
                signal.pause()
        finally:
            ray_serve.shutdown()
            ray.shutdown()


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    flags = Flags(model=options.model.resolve(), threads=options.threads, slots=options.slots)
    program = (sys.executable, "-m", "benchmarks.ray_cost", _SERVE)
    commands = [Command("ray", program), attrs.evolve(trioserve(), name="direct")]
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        try:
            with all_running(commands, flags, Path(folder)) as targets:
                results = measure_all(options, targets)
        except TargetError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.json is not None:
        report.write_json(options.json, {"options": report.plain(options), "results": results})
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(serve(arguments[1:]) if arguments[:1] == [_SERVE] else main(arguments))
