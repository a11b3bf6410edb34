"""A GPU, measured in nine minutes: trioserve beside llama-server on the same library.

    export LLAMA_CPP_LIB_PATH=BUILD/bin
    python -m benchmarks.gpu --model MODEL.gguf --llama-server BUILD/bin/llama-server --out DIR

Each part starts its servers, measures them in turn, and writes what is known so far. With
`--device cpu` everything is tried without a GPU. README.md shows how to build llama.cpp with CUDA.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks import report
from benchmarks.cancel import PHASES, Cancel
from benchmarks.pair import Drafted, Edit
from benchmarks.report import Scenario, bounded, in_turn, progress, seconds, warm_up
from benchmarks.scenarios import LongPrompt, Settings, SharedPrefix, Streams, first_requests
from benchmarks.servers import (
    BASE,
    OURS,
    Command,
    Flags,
    Target,
    TargetError,
    all_running,
    exit_on_sigterm,
    llama_server,
    pss_of,
    trioserve,
)
from benchmarks.stats import Metric, Sample
from benchmarks.wire import Shape

SAMPLING = "backend sampling"
DRAFTED = "drafts"

#: Samples of each server by scenario.
Found = dict[str, dict[str, list[Sample]]]


@attrs.frozen(kw_only=True)
class Part:
    """Servers that run side by side, and their scenarios. `weight` is its share of the time."""

    key: str
    commands: Sequence[Command]
    flags: Flags
    scenarios: Callable[[Settings], Sequence[Scenario]]
    weight: float = 1.0


@attrs.frozen
class Memory:
    """The memory of a server after the scenarios before."""

    name = "memory"
    metrics = (Metric("RAM", "MB", digits=0), Metric("GPU memory", "MB", digits=0))

    def measure(self, target: Target, seed: str) -> Sample:
        """Look once."""
        assert target.pid is not None
        numbers = {"RAM": pss_of(target.pid)[0]}
        rows = [line.split(",") for line in nvidia_smi("compute-apps=pid,used_memory")]
        used = [size.split()[0] for pid, size in rows if pid.strip() == str(target.pid)]
        sizes = [float(size) * 2**20 / 1e6 for size in used if size.isdigit()]
        if sizes:
            numbers["GPU memory"] = sum(sizes)
        return Sample(numbers=numbers)


def nvidia_smi(query: str) -> list[str]:
    """Ask nvidia-smi for the lines of a query; without it, the list is empty."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.strip().splitlines()


def parts(options: argparse.Namespace) -> list[Part]:
    """Return all parts: the servers, their flags, and the scenarios."""
    both = options.both_args + (" -dev none" if options.device == "cpu" else "")

    def pair(more: str = "", kind: str = "") -> list[Command]:
        suffix = f", {kind}" if kind else ""
        ours = trioserve(f"{both} {options.trioserve_args} {more}", OURS + suffix)
        if options.llama_server is None:
            return [ours]
        return [ours, llama_server(options.llama_server, f"{both} {more}", BASE + suffix)]

    def flags(slots: int, context: int, *more: str) -> Flags:
        context_flags = ("-c", str(slots * context), *more)
        return Flags(model=options.model.resolve(), slots=slots, more=context_flags)

    many, few = options.slots, min(8, options.slots)
    quick = options.quick
    powers = [2**i for i in range(many.bit_length()) if 2**i <= many]
    draft = f" -md {shlex.quote(str(options.draft.resolve()))}" if options.draft else ""
    return [
        Part(
            key="streams",
            commands=pair(),
            flags=flags(many, 512),
            scenarios=lambda s: [*(Streams(s, count) for count in powers), Memory()],
            weight=3.0,
        ),
        Part(
            key="sampling",
            commands=[*pair("-bs", SAMPLING), pair()[0]],
            flags=flags(many, 512),
            scenarios=lambda s: [Streams(s, count) for count in sorted({1, few, many})],
            weight=2.0,
        ),
        Part(
            key="long-prompt",
            commands=pair(),
            flags=flags(few, 4096),
            scenarios=lambda s: [
                LongPrompt(
                    s, prompt_tokens=600 if quick else 3000, max_tokens=150 if quick else 400
                ),
                SharedPrefix(s, few, 200 if quick else 1000),
            ],
        ),
        Part(
            key="cancel",
            commands=pair(),
            flags=flags(few, 4096, "-b", "512"),
            scenarios=lambda s: [
                Cancel(s, phase, 4 if quick else 20, max_seconds=5.0 if quick else 15.0)
                for phase in PHASES
            ],
        ),
        Part(
            key="drafts",
            commands=[
                *reversed(pair(f"--metrics --spec-type ngram-mod{draft}", DRAFTED)),
                *reversed(pair("--metrics")),
            ],
            flags=flags(few, 4096),
            scenarios=lambda s: [
                *(Drafted(Edit(s, count)) for count in sorted({1, few})),
                Drafted(Streams(s, few)),
            ],
        ),
    ]


def measure_part(options: argparse.Namespace, part: Part, until: float) -> Found:
    """Start the servers of a part, and measure its scenarios within the time.

    Raises:
        TargetError: a server could not be started, or does not answer, or that took all the time.
    """
    note = progress(options.quiet)
    found = Found()
    logs = options.out / "logs" / part.key
    with all_running(part.commands, part.flags, logs, start_timeout=120.0) as targets:
        shape = Shape(api="completion", max_tokens=16 if options.quick else 128)
        settings = Settings(shape=shape, slots=part.flags.slots, max_time=30.0).fit(targets[0])
        warm_up(targets, first_requests(settings))
        scenarios = part.scenarios(settings)
        for i, scenario in enumerate(scenarios):
            now = time.monotonic()
            if now >= until and not isinstance(scenario, Memory):
                note(f"  {scenario.name}: left out, since the time of this part was up")
                continue
            share = now + (until - now) / (len(scenarios) - i)
            samples = in_turn(targets, scenario, options.rounds, note, until=share)
            found[scenario.name] = samples
            print(report.table(scenario.name, scenario.metrics, samples), flush=True)
    if not found:
        raise TargetError("the time of this part was up once its servers had started")
    return found


# -- the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = report.arguments("gpu", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a GGUF file")
    add("--draft", type=Path, help="the GGUF file of its draft model; default: n-grams only")
    add("--out", type=Path, default=Path("gpu"), help="folder for gpu.json and logs")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER"), help="the program")
    add("-np", "--slots", type=bounded(1, 256), default=256)
    add("--rounds", type=bounded(1, 100), default=3, help="runs of each server, if time allows")
    add("--budget", type=seconds, default=510.0, help="seconds for all measurements")
    add("--quick", action="store_true", help="very small sizes: does it work, not how well")
    add("--both-args", default="", help="more flags for both, as one string")
    add("--trioserve-args", default="", help="more flags for trioserve, as one string")
    add("--parts", default="", help="only these, with commas")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a part failed."""
    options = parse(argv)
    exit_on_sigterm()
    note = progress(options.quiet)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.parts.split(",") if options.parts else None
    chosen = [part for part in parts(options) if wanted is None or part.key in wanted]
    names = nvidia_smi("gpu=name,driver_version") if options.device == "cuda" else []
    device = names[0] if names else f"{os.cpu_count()} cores"
    found: dict[str, Any] = {"device": device, "parts": {}, "errors": {}}
    end = time.monotonic() + options.budget
    for i, part in enumerate(chosen):
        now = time.monotonic()
        until = now + (end - now) * part.weight / sum(one.weight for one in chosen[i:])
        note(f"{part.key}: {until - now:.0f} s")
        try:
            if now >= end:
                raise TargetError(f"the {options.budget:g} s of --budget were used up before")
            found["parts"][part.key] = measure_part(options, part, until)
        except Exception as error:  # a failed part does not stop the others
            note(f"  failed: {error!r}")
            found["errors"][part.key] = f"{type(error).__name__}: {error}"
        report.write_json(options.out / "gpu.json", options, found)  # after each part
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
