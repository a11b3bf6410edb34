"""What the way through a router costs, beside a server with the model in its own process.

    python -m benchmarks.router --model model.gguf

A router with one model in a directory, and a server of that model, run side by side and are
measured in turn. `own cpu/event` is the CPU of the process that is asked, without its children, for
each event of a stream: of a router that is what it adds. `slot free` is the time from closing a
connection until no slot is busy, for streams in prefill and in decode, and for whole answers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from benchmarks.cancel import PHASES, WHOLE, Cancel
from benchmarks.harness import Command, Flags, all_running, llama_server, trioserve
from benchmarks.load import Load, bounded, warm_up
from benchmarks.measuring import Scenario, StreamsWithCpu, finish, measure_in_turn
from benchmarks.scenarios import Settings
from benchmarks.targets import Target, tokens_per_word
from benchmarks.wire import Shape
from trioserve.models import BUNDLED

#: The name of the model in the directory.
NAME = "model"


def own_cpu(pid: int) -> float:
    """Return the seconds of CPU that a process has used, without its children."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED, help="the model; by default the bundled one")
    add("--llama-server", type=Path, default=None, help="measure this program in both ways, too")
    add("-t", "--threads", type=bounded(1, 1024), default=None)
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--clients", type=bounded(1, 1024), default=8)
    add("--requests", type=bounded(1, 10_000), default=4, help="for each client")
    add("--max-tokens", type=bounded(1, 100_000), default=200, help="tokens of each output")
    add("--rounds", type=bounded(1, 1000), default=5, help="runs of each server")
    add("--cancels", type=bounded(0, 1000), default=20, help="of each kind, in each round")
    add("--json", type=Path, default=None, help="write all samples to this file")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def commands_of(options: argparse.Namespace, models: Path) -> list[Command]:
    """Return how the servers are started, the base of the ratios last.

    Raises:
        TargetError: llama-server is not there.
    """
    one, many = ("-m", str(options.model.resolve())), ("--models-dir", str(models))
    direct = attrs.evolve(trioserve(), name="direct", more=one)
    commands = [attrs.evolve(trioserve(), name="router", more=many), direct]
    if options.llama_server is not None:
        theirs = llama_server(options.llama_server)
        commands = [
            attrs.evolve(theirs, name="llama-server, router", more=many),
            attrs.evolve(theirs, name="llama-server", more=one),
            *commands,
        ]
    return commands


def measure_all(options: argparse.Namespace, targets: Sequence[Target]) -> dict[str, object]:
    """Measure everything, print the tables, and return the samples.

    Raises:
        TargetError: a server does not answer.
    """
    more = {"model": NAME}
    shape = Shape(max_tokens=options.max_tokens, model=NAME, more=more)
    load = Load(clients=options.clients, requests=options.requests, shape=shape)
    warm_up(targets, attrs.evolve(load, clients=1).measure)
    words_per_token = 1 / tokens_per_word(targets[-1])
    settings = Settings(shape=shape, slots=options.slots, words_per_token=words_per_token)
    loads = (load, attrs.evolve(load, clients=1))
    scenarios: list[Scenario] = [StreamsWithCpu(one, own_cpu, "own cpu/event") for one in loads]
    if options.cancels:
        scenarios += [Cancel(settings, phase, options.cancels) for phase in (*PHASES, WHOLE)]
    return measure_in_turn(options, targets, scenarios)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    flags = Flags(model=None, threads=options.threads, slots=options.slots)

    def measure() -> dict[str, object]:
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
            models = Path(folder) / "models"
            models.mkdir()
            (models / f"{NAME}.gguf").symlink_to(options.model.resolve())
            with all_running(commands_of(options, models), flags, Path(folder)) as targets:
                return measure_all(options, targets)

    return finish(options, measure)


if __name__ == "__main__":
    sys.exit(main())
