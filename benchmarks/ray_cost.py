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

from benchmarks.harness import Command, Flags, all_running, trioserve, usage
from benchmarks.load import Load, bounded, counts, warm_up
from benchmarks.measuring import StreamsWithCpu, finish, measure_in_turn
from benchmarks.targets import Target, TargetError
from benchmarks.wire import Shape
from trioserve.models import BUNDLED

#: The name of the model in the application.
NAME = "model"

#: The first argument of the process that runs the application.
_SERVE = "serve"

#: A loopback address that Ray takes literally; for 127.0.0.1 it puts that of the network in places.
_HOST = "127.0.0.2"


def cpu_of_all(pid: int) -> float:
    """Return the seconds of CPU that a process and its descendants have used."""
    used = usage(pid)
    if used is None:
        raise TargetError("this system does not tell the CPU of processes")
    return used.cpu


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
    warm_up(targets, load.measure)
    loads = (attrs.evolve(load, clients=clients) for clients in options.clients)
    scenarios = [StreamsWithCpu(one, cpu_of_all, "cpu/event") for one in loads]
    return measure_in_turn(options, targets, scenarios)


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

    def measure() -> dict[str, object]:
        with (
            tempfile.TemporaryDirectory(prefix="benchmarks-") as folder,
            all_running(commands, flags, Path(folder)) as targets,
        ):
            return measure_all(options, targets)

    return finish(options, measure)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(serve(arguments[1:]) if arguments[:1] == [_SERVE] else main(arguments))
