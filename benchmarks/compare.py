"""Start trioserve and llama-server with their defaults, and put both through the same scenarios.

    python -m benchmarks.compare --model 110m-32k.gguf --llama-server PATH --clients 1,8

Both run side by side and are measured in turn, A B A B; the last one is the base of the ratios.
Without llama-server, trioserve is measured alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.catalogue import SCENARIOS
from benchmarks.harness import Command, Flags, all_running, exit_on_sigterm, llama_server, trioserve
from benchmarks.load import Load, bounded, counts, interleave, progress, seconds, warm_up
from benchmarks.scenarios import Scenario, Settings
from benchmarks.stats import Sample, worst_failures
from benchmarks.targets import Target, TargetError, tokens_per_word
from benchmarks.wire import APIS, Shape


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the GGUF file that both serve")
    add(
        "--llama-server",
        type=Path,
        default=os.environ.get("LLAMA_SERVER") or None,
        help="the program to compare with; $LLAMA_SERVER",
    )
    add("--no-trioserve", action="store_true", help="measure llama-server alone")
    add("--trioserve-args", default="", help="more flags for trioserve, as one string")
    add("--llama-server-args", default="", help="more flags for llama-server, as one string")
    add("--both-args", default="", help="more flags for both, as one string")
    add("-t", "--threads", type=bounded(1, 512), default=None, help="default: each server's own")
    add("-np", "--slots", type=bounded(1, 256), default=8)
    names = ", ".join(SCENARIOS)
    add("--scenarios", default="streams", help=f"all, or some of: {names}; with commas")
    add("--clients", type=counts, default=[1, 8, 16], help="of the scenario streams")
    add("--requests", type=bounded(1, 10_000), default=2, help="for each client of streams")
    add("--max-tokens", type=bounded(1, 100_000), default=64, help="tokens of each output there")
    add("--api", choices=APIS, default="chat")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--rounds", type=bounded(1, 1000), default=3, help="runs of each server")
    add("--timeout", type=seconds, default=120.0, help="seconds for one request")
    add("--max-time", type=seconds, default=300.0, help="seconds for one run of one server")
    add("--start-timeout", type=seconds, default=180.0, help="seconds until /health answers 200")
    add("--logs", type=Path, default=None, help="folder for the servers' logs, kept")
    add("--json", type=Path, default=None, help="write all samples to this file")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    options = parser.parse_args(argv)
    options.scenarios = (
        list(SCENARIOS) if options.scenarios == "all" else options.scenarios.split(",")
    )
    for name in options.scenarios:
        if name not in SCENARIOS:
            parser.error(f"no scenario is called {name!r}; there are {names}")
    if options.no_trioserve and options.llama_server is None:
        parser.error("nothing to measure: --no-trioserve and no --llama-server")
    return options


def commands_of(options: argparse.Namespace) -> list[Command]:
    """Return how the servers are started, the base of the ratios last.

    Raises:
        TargetError: llama-server is not there.
    """
    commands = [] if options.no_trioserve else [trioserve(options.trioserve_args)]
    if options.llama_server is not None:
        commands.append(llama_server(options.llama_server, options.llama_server_args))
    return commands


def flags_of(options: argparse.Namespace) -> Flags:
    """Return the flags that the servers share."""
    return Flags(
        model=options.model.resolve(),
        threads=options.threads,
        slots=options.slots,
        more=tuple(shlex.split(options.both_args)),
    )


def scenarios_of(options: argparse.Namespace, target: Target) -> list[Scenario]:
    """Make the scenarios. The target says how many tokens a word is."""
    settings = Settings(
        shape=Shape(
            api=options.api, max_tokens=options.max_tokens, temperature=options.temperature
        ),
        words_per_token=1 / tokens_per_word(target),
        slots=options.slots,
        requests=options.requests,
        timeout=options.timeout,
        max_time=options.max_time,
    )
    made = [SCENARIOS[name](settings, options.clients) for name in options.scenarios]
    return [scenario for group in made for scenario in group]


def measure_all(
    options: argparse.Namespace, targets: Sequence[Target], note: Callable[[str], None]
) -> dict[str, dict[str, list[Sample]]]:
    """Run every scenario, print its table, and return the samples by scenario and server.

    Raises:
        TargetError: a server does not answer before the measurement begins.
    """
    results: dict[str, dict[str, list[Sample]]] = {}
    scenarios = scenarios_of(options, targets[0])
    shape = Shape(api=options.api, max_tokens=16, temperature=options.temperature)
    generates = "embeddings" not in options.scenarios
    load = Load(clients=1, requests=2, shape=shape, timeout=options.timeout)
    warm_up(targets, load.measure if generates else scenarios[0].measure)
    for scenario in scenarios:
        samples = interleave(targets, options.rounds, scenario.measure, scenario.name, note)
        results[scenario.name] = samples
        print(report.table(scenario.name, scenario.metrics, samples), flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a request failed, 2 when nothing could be measured."""
    options = parse(argv)
    exit_on_sigterm()
    note = progress(options.quiet)
    results: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        try:
            logs = options.logs or Path(scratch)
            commands, flags = commands_of(options), flags_of(options)
            with all_running(commands, flags, logs, start_timeout=options.start_timeout) as targets:
                note(f"running: {', '.join(target.name for target in targets)}")
                results = measure_all(options, targets, note)
        except TargetError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.json is not None:
        report.write_json(options.json, {"options": report.plain(options), "results": results})
    return 1 if any(worst_failures(samples) for samples in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
