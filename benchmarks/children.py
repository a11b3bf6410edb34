"""How soon a router and the processes of its models are ready, and how much memory they take.

    python -m benchmarks.children --model model.gguf --against ../another-checkout

Each round starts a router with the model under two names, for this checkout and for another one in
turn. `first answer` is from the start of the router until a model that it had to load has answered;
`model` from a request for the other model until its answer, when the router is warm. The memory is
PSS after that: of the second model's process, and of the router with all of its processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.harness import Command, Flags, exit_on_sigterm, family, running, trioserve, usage
from benchmarks.load import bounded
from benchmarks.measuring import finish
from benchmarks.stats import Metric, Sample
from benchmarks.targets import Target, ask
from trioserve.llama.machine import memory_use
from trioserve.models import BUNDLED

METRICS = (
    Metric("router", "s", digits=2),
    Metric("first answer", "s", digits=2),
    Metric("model", "s", digits=3),
    Metric("CPU", "s", digits=2),
    Metric("PSS of a model", "MB", digits=1),
    Metric("PSS of all", "MB", digits=1),
)


def complete(target: Target, model: str) -> None:
    """Have a model of the router generate one token.

    Raises:
        TargetError: it does not answer.
    """
    body = {"model": model, "prompt": "Once", "n_predict": 1}
    ask(target, "POST", "/completion", body, timeout=120.0)


def measure(command: Command, flags: Flags, log: Path) -> Sample:
    """Start a router, have it load both models, and stop it.

    Raises:
        TargetError: it does not start, or does not answer.
    """
    began = time.monotonic()
    with running(command, flags, log) as target:
        ready = time.monotonic()
        complete(target, "first")
        answered = time.monotonic()
        complete(target, "second")
        numbers = {
            "router": ready - began,
            "first answer": answered - began,
            "model": time.monotonic() - answered,
        }
        assert target.pid is not None
        if (used := usage(target.pid)) is not None:
            numbers["CPU"] = used.cpu
        memory = {pid: pss for pid, (pss, _) in memory_use(family(target.pid)).processes.items()}
        models = json.loads(ask(target, "GET", "/v1/models"))["data"]
    (child,) = (one["status"]["pid"] for one in models if one["id"] == "second")
    numbers["PSS of a model"] = memory[child] / 1e6
    numbers["PSS of all"] = sum(memory.values()) / 1e6
    return Sample(numbers=numbers, requests=2)


def measure_all(options: argparse.Namespace) -> dict[str, object]:
    """Measure the routers in turn, print the table, and return the samples.

    Raises:
        TargetError: a router does not start, or does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        models.mkdir()
        for name in ("first", "second"):
            (models / f"{name}.gguf").symlink_to(options.model.resolve())
        flags = Flags(model=None, slots=0, more=("--models-dir", str(models)))
        commands = [trioserve()]
        for path in options.against:
            python = ("env", f"PYTHONPATH={path.resolve()}", sys.executable, "-P")
            commands.append(Command(path.name, (*python, "-m", "trioserve")))
        samples: dict[str, list[Sample]] = {command.name: [] for command in commands}
        for i in range(-1, options.rounds):  # the first round makes files known, and warm
            for command in commands[:: -1 if i % 2 else 1]:
                sample = measure(command, flags, Path(folder) / "log")
                samples[command.name] += [sample] * (i >= 0)
    print(report.table(f"a router of {options.model.name}", METRICS, samples), flush=True)
    return {options.model.name: samples}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.children", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED, help="a GGUF file; by default the bundled one")
    add("--against", type=Path, action="append", default=[], help="another checkout; repeatable")
    add("--rounds", type=bounded(1, 1000), default=5, help="starts of each router")
    add("--json", type=Path, default=None, help="write all samples to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    exit_on_sigterm()
    return finish(options, lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
