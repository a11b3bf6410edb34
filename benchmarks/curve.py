"""A long prompt beside streams: the time to its first token, for several paces of the streams.

    python -m benchmarks.curve --model MODEL.gguf --llama-server PATH --out DIR

trioserve is started once for each `--max-tick-ms`, 0 being its default, and llama-server once. All
are measured in turn. `curve.svg` shows the time to the first token of the prompt over the gaps in
the streams meanwhile: a line for trioserve, a point for llama-server.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from benchmarks import report
from benchmarks.harness import Flags, all_running, llama_server, trioserve
from benchmarks.load import Load, bounded, counts, interleave, progress, warm_up
from benchmarks.rows import BASE, OURS
from benchmarks.scenarios import LongPrompt, Settings
from benchmarks.stats import Sample, worst_failures
from benchmarks.targets import TargetError, tokens_per_word
from benchmarks.wire import Shape
from trioserve.bench import plot
from trioserve.bench.report import machine
from trioserve.bench.stats import Spread, spread

_GAP, _TTFT = "itl p99 meanwhile", "long prompt ttft"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.curve", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the GGUF file that all serve")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER"), help="the program")
    add("--paces", type=counts, default=[20, 40, 80, 160], help="milliseconds, with commas")
    add("-t", "--threads", type=bounded(1, 512), default=None)
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--prompt-tokens", type=bounded(1, 1_000_000), default=3000)
    add("--rounds", type=bounded(1, 1000), default=5, help="runs of each server")
    add("--out", type=Path, required=True, help="folder for curve.json, curve.svg and logs")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def points(samples: Mapping[str, Sequence[Sample]]) -> dict[str, list[tuple[float, Spread]]]:
    """Return the points of each server's line: the gap, and the prompt's time to first token."""
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for name, runs in samples.items():
        gap, ttft = (
            spread([run.numbers[metric] for run in runs if metric in run.numbers])
            for metric in (_GAP, _TTFT)
        )
        if gap is not None and ttft is not None:
            lines.setdefault(BASE if name == BASE else OURS, []).append((round(gap.median), ttft))
    return {server: sorted(line, key=lambda point: point[0]) for server, line in lines.items()}


def picture(samples: Mapping[str, Sequence[Sample]], scenario: str, caption: str) -> str:
    """Draw the lines.

    Raises:
        TargetError: nothing was measured.
    """
    lines = points(samples)
    if not lines:
        raise TargetError("nothing was measured")
    chart = plot.Chart(
        title="Time to the first token of the prompt, ms",
        x_title="gap in a stream meanwhile, p99, ms",
        more_is_better=False,
        lines=lines,
    )
    return plot.curves(scenario, [OURS, BASE], [chart], caption)


def measure(options: argparse.Namespace) -> dict[str, list[Sample]]:
    """Measure all servers in turn, and print the table.

    Raises:
        TargetError: a server cannot be started, or does not answer.
    """
    commands = [
        attrs.evolve(trioserve(f"--max-tick-ms {pace}"), name=f"{OURS}, {pace or 'default'}")
        for pace in (0, *options.paces)
    ]
    if options.llama_server is not None:
        commands.append(llama_server(options.llama_server))
    flags = Flags(model=options.model.resolve(), threads=options.threads, slots=options.slots)
    with all_running(commands, flags, options.out / "logs") as targets:
        settings = Settings(
            shape=Shape(api="completion"),
            words_per_token=1 / tokens_per_word(targets[0]),
            slots=options.slots,
        )
        warm_up(targets, Load(clients=1, requests=2, shape=settings.shape).measure)
        scenario = LongPrompt(settings, prompt_tokens=options.prompt_tokens)
        note = progress(options.quiet)
        samples = interleave(targets, options.rounds, scenario.measure, scenario.name, note)
    print(report.table(scenario.name, scenario.metrics, samples), flush=True)
    if worst_failures(samples):
        raise TargetError("requests failed")
    threads = f" -t {options.threads}" if options.threads else ""
    caption = (
        f"Model: {options.model.stem}. Both servers with -np {options.slots}{threads}; {OURS} with "
        f"--max-tick-ms 0 (its default), {', '.join(map(str, options.paces))}. Medians of "
        f"{options.rounds} rounds, all in turn; bands reach from the least to the greatest. "
        f"{machine()['cores']} cores."
    )
    drawn = picture(samples, scenario.name, caption)
    (options.out / "curve.svg").write_text(drawn, encoding="utf-8")
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        samples = measure(options)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    content = {"options": report.plain(options), "samples": samples}
    report.write_json(options.out / "curve.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
