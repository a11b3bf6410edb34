"""How soon servers are ready, and how much memory they take: each round starts each of them.

    python -m benchmarks.start --model 110m.gguf --llama-server PATH --rounds 5

With a warm page cache, a cold one (without the file of the model), and, for trioserve, with a file
that it has not loaded before. The memory is PSS, in which shared pages count in parts, after one
answer. `--also` measures trioserve with other flags, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from benchmarks import report
from benchmarks.harness import (
    Command,
    Flags,
    exit_on_sigterm,
    family,
    llama_server,
    running,
    trioserve,
    usage,
)
from benchmarks.load import bounded
from benchmarks.measuring import finish
from benchmarks.stats import Metric, Sample
from benchmarks.targets import TargetError, ask
from trioserve.llama.machine import memory_use

METRICS = (
    Metric("ready", "s", digits=2),
    Metric("CPU until ready", "s", digits=2),
    Metric("PSS", "MB"),
    Metric("of this, no file's", "MB"),
    Metric("one stream, tokens/s", "", more_is_better=True),
)
WARM, COLD, NEW = "warm", "cold", "new file"

#: Where trioserve remembers the files that it has loaded.
_STATE = "XDG_STATE_HOME"


def forget(path: Path) -> None:
    """Have the system drop a file's pages, as far as no process has mapped them."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(command: Command, flags: Flags, log: Path, n_tokens: int) -> Sample:
    """Start a server, have it generate once, and stop it.

    Raises:
        TargetError: it does not start, or does not answer.
    """
    began = time.monotonic()
    with running(command, flags, log) as target:
        ready = time.monotonic() - began
        assert target.pid is not None
        used = usage(target.pid)
        body = {"prompt": "Once upon a time", "n_predict": n_tokens, "ignore_eos": True}
        answer = ask(target, "POST", "/completion", body, timeout=120.0)
        processes = memory_use(family(target.pid)).processes.values()
    numbers = {
        "ready": ready,
        "PSS": sum(pss for pss, _ in processes) / 1e6,
        "of this, no file's": sum(anonymous for _, anonymous in processes) / 1e6,
        "one stream, tokens/s": json.loads(answer)["timings"]["predicted_per_second"],
    }
    if used is not None:
        numbers["CPU until ready"] = used.cpu
    return Sample(numbers=numbers, requests=1)


def measure_all(options: argparse.Namespace, commands: Sequence[Command]) -> dict[str, object]:
    """Measure all models, print the tables, and return the samples.

    Raises:
        TargetError: a server does not start, or does not answer.
    """
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        log, known = Path(folder) / "log", os.environ.get(_STATE)
        for model, kind in [(model, kind) for model in options.model for kind in options.kinds]:
            flags = Flags(model=model, slots=0)
            samples: dict[str, list[Sample]] = {command.name: [] for command in commands}
            for i in range(-1, options.rounds):  # the first round makes files known, and warm
                for command in commands[:: -1 if i % 2 else 1]:
                    if kind == NEW:
                        os.environ[_STATE] = tempfile.mkdtemp(dir=folder)
                    elif kind == COLD:
                        forget(model)
                    sample = measure(command, flags, log, options.max_tokens)
                    samples[command.name] += [sample] * (i >= 0)
            if known is None:
                os.environ.pop(_STATE, None)
            else:
                os.environ[_STATE] = known
            name = f"{model.name}, {kind}"
            results[name] = samples
            print(report.table(name, METRICS, samples), flush=True)
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, action="append", required=True, help="a GGUF file; repeatable")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER"), help="the program")
    add("--also", action="append", default=[], metavar="FLAGS", help="other flags for trioserve")
    add("--kinds", nargs="+", choices=(WARM, COLD, NEW), default=[WARM, COLD, NEW])
    add("--max-tokens", type=bounded(1, 100_000), default=64, help="tokens of the answer")
    add("--rounds", type=bounded(1, 1000), default=5, help="starts of each server")
    add("--json", type=Path, default=None, help="write all samples to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    exit_on_sigterm()
    commands = [trioserve()]
    commands += [attrs.evolve(trioserve(more), name=f"trioserve {more}") for more in options.also]
    try:
        if options.llama_server is not None:
            commands.append(llama_server(options.llama_server))
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return finish(options, lambda: measure_all(options, commands))


if __name__ == "__main__":
    sys.exit(main())
