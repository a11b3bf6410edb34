"""All that there is to know about a GPU, in one command and under nine minutes.

    python -m benchmarks.gpu --model MODEL.gguf --out DIR
    python -m benchmarks.gpu --build-only --arch 90 --sources llama_cpp_python-0.3.36.tar.gz

llama.cpp with CUDA is found in `--build`, or compiled into it where nvcc is; both servers use this
library. Each part starts its servers, measures them in turn, and writes what is known so far. With
`--device cpu` everything is tried without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from benchmarks import cuda_build, report
from benchmarks.cancel import PHASES, Cancel
from benchmarks.drafts import Edit
from benchmarks.harness import (
    Command,
    Flags,
    all_running,
    exit_on_sigterm,
    llama_server,
    trioserve,
    usage,
)
from benchmarks.load import Load, bounded, progress, seconds, warm_up
from benchmarks.pair import Drafted
from benchmarks.pictures import TITLES
from benchmarks.proof import rounds_in_time
from benchmarks.rows import BASE, OURS
from benchmarks.scenarios import LongPrompt, Scenario, Settings, SharedPrefix, Streams
from benchmarks.stats import Metric, Sample, column
from benchmarks.steps import Device, measure_server
from benchmarks.targets import Target, TargetError, tokens_per_word
from benchmarks.wire import Shape
from trioserve.bench import plot
from trioserve.bench.stats import Spread, spread

SAMPLING = "backend sampling"
DRAFTED = "drafts"

#: Samples of each server by scenario.
Found = dict[str, dict[str, list[Sample]]]

_BARS = (
    "itl p99 meanwhile",
    "long prompt ttft",
    "slot free p99",
    "ttft p99 / one prefill",
    "wall s",
    "decode tokens/s",
    "RAM",
    "GPU memory",
)


@attrs.frozen(kw_only=True)
class Part:
    """Servers that run side by side, and what they are put through.

    `weight` is its share of the time.
    """

    key: str
    commands: tuple[Command, ...]
    flags: Flags
    scenarios: Callable[[Settings], Sequence[Scenario]]
    weight: float = 1.0


@attrs.frozen
class Memory:
    """What a server holds after the scenarios before."""

    name = "memory"
    metrics = (Metric("RAM", "MB", digits=0), Metric("GPU memory", "MB", digits=0))

    def measure(self, target: Target, seed: str) -> Sample:
        """Look once."""
        assert target.pid is not None
        numbers = {}
        if (used := usage(target.pid)) is not None:
            numbers["RAM"] = used.memory / 1e6
        if (on_gpu := gpu_memory(target.pid)) is not None:
            numbers["GPU memory"] = on_gpu
        return Sample(numbers=numbers, requests=0)


def gpu_memory(pid: int) -> float | None:
    """Return how many MB of a GPU's memory a process has; None where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return read_gpu_memory(done.stdout, pid)


def read_gpu_memory(text: str, pid: int) -> float | None:
    """Read lines such as "1234, 5678 MiB" for a process."""
    rows = [line.split(",") for line in text.splitlines() if "," in line]
    found = [used.split() for owner, used, *_ in rows if owner.strip() == str(pid)]
    sizes = [float(size) * 2**20 / 1e6 for size, *_ in found if size.replace(".", "").isdigit()]
    return sum(sizes) if sizes else None


# -- the parts


def parts(options: argparse.Namespace) -> list[Part]:
    """Return all parts: the servers, their flags, and the scenarios."""
    both = options.both_args + (" -dev none" if options.device == "cpu" else "")

    def ours(more: str = "", name: str = "") -> Command:
        label = f"{OURS}, {name}" if name else OURS
        return attrs.evolve(trioserve(f"{both} {options.trioserve_args} {more}"), name=label)

    def theirs(more: str = "", name: str = "") -> list[Command]:
        if options.llama_server is None:
            return []
        label = f"{BASE}, {name}" if name else BASE
        return [attrs.evolve(llama_server(options.llama_server, f"{both} {more}"), name=label)]

    def flags(slots: int, context: int, *more: str) -> Flags:
        where = options.model.resolve()
        return Flags(model=where, slots=slots, more=("-c", str(slots * context), *more))

    many, few = options.slots, min(8, options.slots)
    quick = options.quick
    counts = [2**i for i in range(many.bit_length()) if 2**i <= many]
    long = 600 if quick else 3000
    drafts = f"--spec-type ngram-mod{_draft_flags(options)}"
    return [
        Part(
            key="streams",
            commands=(ours(), *theirs()),
            flags=flags(many, 512),
            scenarios=lambda settings: [
                *(Streams(settings, count, 1) for count in counts),
                Memory(),
            ],
            weight=3.0,
        ),
        Part(
            key="sampling",
            commands=(ours("-bs", SAMPLING), *theirs("-bs", SAMPLING), ours()),
            flags=flags(many, 512),
            scenarios=lambda settings: [
                Streams(settings, count, 1) for count in dict.fromkeys((1, few, many))
            ],
            weight=2.0,
        ),
        Part(
            key="long-prompt",
            commands=(ours(), *theirs()),
            flags=flags(few, 4096),
            scenarios=lambda settings: [
                LongPrompt(settings, prompt_tokens=long, max_tokens=150 if quick else 400),
                SharedPrefix(settings, few, 200 if quick else 1000),
            ],
        ),
        Part(
            key="cancel",
            commands=(ours(), *theirs()),
            flags=flags(few, 4096, "-b", "512"),
            scenarios=lambda settings: [
                Cancel(settings, phase, 4 if quick else 20, max_seconds=5.0 if quick else 15.0)
                for phase in PHASES
            ],
        ),
        Part(
            key="drafts",
            commands=(
                *theirs(f"--metrics {drafts}", DRAFTED),
                ours(f"--metrics {drafts}", DRAFTED),
                *theirs("--metrics"),
                ours("--metrics"),
            ),
            flags=flags(few, 4096),
            scenarios=lambda settings: [
                *(Edit(settings, count) for count in dict.fromkeys((1, few))),
                Drafted(Streams(settings, few, 1)),
            ],
        ),
    ]


def _draft_flags(options: argparse.Namespace) -> str:
    return f" -md {shlex.quote(str(options.draft.resolve()))}" if options.draft else ""


def measure_part(options: argparse.Namespace, part: Part, until: float) -> Found:
    """Start the servers of a part, and measure its scenarios within the time.

    Raises:
        TargetError: a server could not be started, or does not answer, or that took all the time.
    """
    note = progress(options.quiet)
    logs, found = options.out / "logs" / part.key, Found()
    with all_running(part.commands, part.flags, logs, start_timeout=120.0) as targets:
        settings = Settings(
            shape=Shape(api="completion", max_tokens=16 if options.quick else 128),
            words_per_token=1 / tokens_per_word(targets[0]),
            slots=part.flags.slots,
            timeout=30.0,
            max_time=30.0,
        )
        warm_up(targets, Load(clients=1, requests=2, shape=settings.with_tokens(16)).measure)
        scenarios = part.scenarios(settings)
        for i, scenario in enumerate(scenarios):
            now = time.monotonic()
            if now >= until and not isinstance(scenario, Memory):
                note(f"  {scenario.name}: left out, since the time of this part was up")
                continue
            share = now + (until - now) / (len(scenarios) - i)
            found[scenario.name] = rounds_in_time(targets, scenario, options.rounds, share, note)
            print(report.table(scenario.name, scenario.metrics, found[scenario.name]), flush=True)
    if not found:
        raise TargetError("the time of this part was up once its servers had started")
    return found


def python_share(options: argparse.Namespace, streams: Found) -> dict[str, float]:
    """Measure Python's part of a step with the most streams, on a device that takes as long.

    Raises:
        TargetError: it is not known how long it takes.
    """
    rates = {
        int(name.partition(" stream")[0]): max(found)
        for name, samples in streams.items()
        if " stream" in name and (found := column(samples.get(OURS, ()), "tokens/s"))
    }
    if not rates:
        raise TargetError("no streams were measured")
    slots = max(rates)
    step = slots / rates[slots]
    n_steps = max(20, min(300, int(10 / step)))
    device = Device(step, polls=options.device != "cpu")
    cost = trio.run(partial(measure_server, slots, device, n_steps))
    return {
        "slots": slots,
        "step ms": step * 1e3,
        "python us": cost.python * 1e6,
        "share": cost.python / step,
        "event loop us": (cost.loop or 0.0) * 1e6,
    }


# -- the pictures


def pictures(parts: Mapping[str, Found], caption: str) -> dict[str, str]:
    """Draw what was measured; returns the SVG of each file."""
    drawn = {}
    for key, title in (("streams", "1 to many streams"), ("sampling", "Sampling on the GPU")):
        charts = [_chart(parts.get(key, {}), metric) for metric in ("tokens/s", "ttft p50")]
        charts = [chart for chart in charts if chart.lines]
        if charts:
            servers = list(charts[0].lines)
            drawn[f"gpu-{key}.svg"] = plot.curves(title, servers, charts, caption)
    rest = [found for key, found in parts.items() if key != "sampling"]
    panels = [panel for metric in _BARS if (panel := _panel(rest, metric)).rows]
    if panels:
        title = f"{OURS} beside {BASE}"
        drawn["gpu.svg"] = plot.bars(title, [OURS, BASE], panels, caption)
    return drawn


def _chart(found: Found, metric: str) -> plot.Chart:
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for name, samples in found.items():
        clients = name.partition(" stream")[0]
        for server, runs in samples.items():
            value = spread(column(runs, metric))
            if clients.isdigit() and value is not None:
                lines.setdefault(server, []).append((float(clients), value))
    return plot.Chart(
        title=TITLES[metric],
        x_title="streams at the same time",
        more_is_better=metric == "tokens/s",
        lines=lines,
    )


def _panel(parts: Sequence[Found], metric: str) -> plot.Panel:
    rows = []
    for name, samples in (item for found in parts for item in found.items()):
        if metric == "wall s" and "sharing" not in name:
            continue  # of streams, throughput says the same
        for kind in ("", f", {DRAFTED}"):
            values = {
                server: value
                for server in (OURS, BASE)
                if (value := spread(column(samples.get(server + kind, ()), metric))) is not None
            }
            if values:
                rows.append(plot.Row(label=name + kind, values=values))
    return plot.Panel(
        title=TITLES.get(metric, metric), more_is_better="tokens/s" in metric, rows=rows
    )


# -- the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, help="a GGUF file")
    add("--draft", type=Path, help="the GGUF file of its draft model; default: n-grams only")
    add("--out", type=Path, default=Path("gpu"), help="folder for gpu.json, pictures and logs")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--build", type=Path, default=_build_folder(), help="folder of llama.cpp with CUDA")
    add("--build-only", action="store_true", help="compile it, and measure nothing")
    add("--arch", help="the architecture to compile for, such as 90; default: that of the GPU")
    add("--sources", type=Path, help="llama-cpp-python's source distribution; default: of PyPI")
    add("-j", "--jobs", type=bounded(1, 512), default=os.cpu_count() or 1, help="compilers at once")
    add("--llama-server", type=Path, default=None, help="the program; default: that of the build")
    add("-np", "--slots", type=bounded(1, 256), default=256)
    add("--rounds", type=bounded(1, 100), default=3, help="runs of each server, if time allows")
    add("--budget", type=seconds, default=510.0, help="seconds for all measurements")
    add("--quick", action="store_true", help="very small sizes: does it work, not how well")
    add("--both-args", default="", help="more flags for both, as one string")
    add("--trioserve-args", default="", help="more flags for trioserve, as one string")
    add("--parts", default="", help="only these, with commas")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    options = parser.parse_args(argv)
    if not options.build_only and (options.model is None or not options.model.is_file()):
        parser.error("which --model?")
    return options


def _build_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trioserve" / "cuda"


def prepare(options: argparse.Namespace) -> None:
    """Find or compile llama.cpp with CUDA, and have both servers use it.

    Raises:
        TargetError: it is not there and cannot be compiled.
    """
    build = cuda_build.Build(options.build.resolve())
    if not build.is_there:
        arch = options.arch or cuda_build.architecture()
        cuda_build.build(build, arch, options.sources, options.jobs, progress(options.quiet))
    os.environ |= build.environ(os.environ)
    options.llama_server = options.llama_server or build.llama_server


def device_name(options: argparse.Namespace) -> str:
    """Say what computes."""
    if options.device == "cpu":
        return f"{os.cpu_count()} cores"
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0]


def write(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write what is known so far: after each part, so that an early end loses nothing."""
    report.write_json(options.out / "gpu.json", {"options": report.plain(options), **found})
    caption = (
        f"{found['device']}; model {options.model.stem}; both servers on the same llama.cpp. "
        "Medians of the rounds, the servers in turn; bands and thin lines reach from the least "
        "to the greatest."
    )
    for name, picture in pictures(found["parts"], caption).items():
        (options.out / name).write_text(picture, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a part failed, 2 when nothing could be measured."""
    options = parse(argv)
    exit_on_sigterm()
    note = progress(options.quiet)
    try:
        if options.device == "cuda" or options.build_only:
            prepare(options)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.build_only:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.parts.split(",") if options.parts else None
    chosen = [part for part in parts(options) if wanted is None or part.key in wanted]
    found: dict[str, Any] = {"device": device_name(options), "parts": {}, "errors": {}}
    end = time.monotonic() + options.budget
    for i, part in enumerate(chosen):
        now = time.monotonic()
        until = now + (end - now) * part.weight / sum(one.weight for one in chosen[i:])
        note(f"{part.key}: {until - now:.0f} s")
        try:
            if now >= end:
                raise TargetError(f"the {options.budget:g} s of --budget were used up before")
            found["parts"][part.key] = measure_part(options, part, until)
            if part.key == "streams":
                found["python"] = python_share(options, found["parts"]["streams"])
                print("  ".join(f"{name}: {value:.3g}" for name, value in found["python"].items()))
        except Exception as error:  # a failed part does not stop the others
            note(f"  failed: {error!r}")
            found["errors"][part.key] = f"{type(error).__name__}: {error}"
        write(options, found)
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
