"""The whole table of targets, measured and judged: trioserve beside llama-server.

    python -m benchmarks.proof --model 25m-152k.gguf --model 110m-32k.gguf --out DIR
    python -m benchmarks.proof --draw DIR/results.json --out docs

Each row starts both servers afresh, measures them in turn, A B A B, and says what was measured,
what the target is, and whether it is met. A row that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks import pictures, report
from benchmarks.busy import busy
from benchmarks.harness import (
    Flags,
    all_running,
    exit_on_sigterm,
    layout_of,
    llama_server,
    trioserve,
)
from benchmarks.load import Load, bounded, progress, seconds, warm_up
from benchmarks.rows import BASE, MET, MISSED, QUICK, Check, Row, Sizes, Verdict, judge, rows
from benchmarks.scenarios import Scenario, Settings
from benchmarks.stats import Sample
from benchmarks.targets import Target, TargetError, tokens_per_word
from benchmarks.wire import Shape
from trioserve.bench.report import machine

Note = Callable[[str], None]


@attrs.frozen(kw_only=True)
class Result:
    """A scenario of a row with one model: its samples by server, and the verdicts."""

    model: str
    row: str
    scenario: str
    samples: dict[str, list[Sample]] = attrs.field(factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    error: str = ""
    layouts: dict[str, str] = attrs.field(factory=dict)  # of the KV cache, by server


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proof", description=(__doc__ or "").partition("\n")[0]
    )
    keys = [row.key for row in rows(Sizes())]
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        action="append",
        default=[],
        help="a GGUF file; given more than once, rows of one model use the last one",
    )
    add("--draw", type=Path, help="a results.json: only draw its pictures again, into --out")
    add("--out", type=Path, required=True, help="folder for results.json, .md, pictures and logs")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER") or None)
    add(
        "--rows",
        default="all",
        help=f"all, table (what people start), or some of: {', '.join(keys)}; with commas",
    )
    add("--quick", action="store_true", help="very small sizes: does it work, not how well")
    add("--rounds", type=bounded(1, 100), default=5, help="runs of each server, if time allows")
    add("--budget", type=seconds, default=690.0, help="seconds for all; rounds are left out for it")
    add("--max-time", type=seconds, default=60.0, help="seconds for one run of one server")
    add("-t", "--threads", type=bounded(1, 512), default=None, help="default: each server's own")
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--both-args", default="", help="more flags for both, as one string")
    add("--trioserve-args", default="", help="more flags for trioserve, as one string")
    add("--llama-server-args", default="", help="more flags for llama-server, as one string")
    add("--start-timeout", type=seconds, default=60.0, help="seconds until /health answers 200")
    add("--busy", type=bounded(0, 512), default=0, help="processes that keep a core busy meanwhile")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    options = parser.parse_args(argv)
    named = {"all": keys, "table": [row.key for row in rows(Sizes()) if row.in_table]}
    options.rows = named.get(options.rows) or options.rows.split(",")
    for key in options.rows:
        if key not in keys:
            parser.error(f"no row is called {key!r}; there are {', '.join(keys)}")
    if not options.model and options.draw is None:
        parser.error("which --model?")
    for path in (*options.model, options.draw):
        if path is not None and not path.is_file():
            parser.error(f"{path} is no file")
    return options


def jobs_of(options: argparse.Namespace) -> list[tuple[Path, Row]]:
    """Return what is run: rows of every model with each, the others with the last."""
    chosen = [row for row in rows(QUICK if options.quick else Sizes()) if row.key in options.rows]
    last = len(options.model) - 1
    return [
        (model, row)
        for number, model in enumerate(options.model)
        for row in chosen
        if row.every_model or number == last
    ]


def settings_of(options: argparse.Namespace, target: Target) -> Settings:
    """Make what the scenarios have in common. The target says how many tokens a word is."""
    sizes = QUICK if options.quick else Sizes()
    return Settings(
        shape=Shape(max_tokens=sizes.max_tokens),
        words_per_token=1 / tokens_per_word(target),
        slots=options.slots,
        requests=sizes.requests,
        timeout=options.max_time,
        max_time=options.max_time,
    )


def rounds_in_time(
    targets: Sequence[Target],
    scenario: Scenario,
    rounds: int,
    until: float,
    note: Note,
) -> dict[str, list[Sample]]:
    """Measure A B, B A, and so on, at least once; no round begins that would end after `until`.

    A round has the same seed for every server. An error ends it and is part of the sample.
    """
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    longest = 0.0
    for number in range(rounds):
        started = time.monotonic()
        if number and started + longest > until:
            break
        for target in targets if number % 2 == 0 else reversed(targets):
            note(f"  {scenario.name}, round {number + 1}: {target.name}")
            try:
                sample = scenario.measure(target, f"{scenario.name} round {number}")
            except (TargetError, OSError, ValueError, KeyError) as error:
                sample = Sample(numbers={}, requests=1, failed=1, errors=(repr(error),))
            samples[target.name].append(sample)
        longest = max(longest, time.monotonic() - started)
    return samples


def run_row(
    options: argparse.Namespace, model: Path, row: Row, until: float, note: Note
) -> list[Result]:
    """Start both servers, run the scenarios of a row, and judge them.

    Raises:
        TargetError: a server could not be started, or does not answer.
    """
    both = row.both_args
    commands = [trioserve(f"{options.trioserve_args} {row.trioserve_args} {both}")]
    if options.llama_server is not None:
        commands.append(llama_server(options.llama_server, f"{options.llama_server_args} {both}"))
    logs = options.out / "logs" / f"{model.stem}-{row.key}"
    flags = flags_of(options, model)
    results = []
    with all_running(commands, flags, logs, start_timeout=options.start_timeout) as targets:
        pairs = row.scenarios(settings_of(options, targets[0]))
        load = Load(clients=1, requests=2, shape=Shape(max_tokens=16))
        warm_up(targets, load.measure if row.generates else pairs[0][0].measure)
        for number, (scenario, checks) in enumerate(pairs):
            now = time.monotonic()
            share = now + (until - now) / (len(pairs) - number)
            samples = rounds_in_time(targets, scenario, options.rounds, share, note)
            title = f"{model.stem}: {scenario.name}"
            print(report.table(title, scenario.metrics, samples), flush=True)
            results.append(
                Result(
                    model=model.stem,
                    row=row.key,
                    scenario=scenario.name,
                    samples=samples,
                    verdicts=tuple(judge(check, samples) for check in checks),
                    layouts={t.name: layout_of(logs / f"{t.name}.log") for t in targets},
                )
            )
    return results


def flags_of(options: argparse.Namespace, model: Path) -> Flags:
    """Return the flags that the servers share."""
    return Flags(
        model=model.resolve(),
        threads=options.threads,
        slots=options.slots,
        more=tuple(shlex.split(options.both_args)),
    )


def summary(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the table, the head first: a line for each figure, a column for each model."""
    models = list(dict.fromkeys(result.model for result in results))
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for result in results:
        if result.error:
            cells = lines.setdefault((result.scenario, "-", "-"), {})
            cells[result.model] = f"failed: {result.error.splitlines()[0]}"
        for verdict in result.verdicts:
            check = verdict.check
            cell = f"{check.show(verdict.value)} {verdict.outcome}"
            if verdict.base is not None:
                cell += f" ({BASE} {check.show(verdict.base)})"
            cells = lines.setdefault((result.scenario, check.text, check.target), {})
            cells[result.model] = cell
    head = ("scenario", "figure", "target", *models)
    return [head, *((*line, *(cells.get(m, "") for m in models)) for line, cells in lines.items())]


def layouts(results: Sequence[Result]) -> list[str]:
    """Say which KV caches the servers had, for each model and its rows."""
    rows_with: dict[tuple[str, str], dict[str, None]] = {}
    for result in results:
        if result.layouts:
            named = ", ".join(f"{name} {layout}" for name, layout in result.layouts.items())
            rows_with.setdefault((result.model, named), {})[result.row] = None
    return [f"- {model} ({', '.join(keys)}): {named}" for (model, named), keys in rows_with.items()]


def write(options: argparse.Namespace, results: Sequence[Result]) -> None:
    """Write what is known so far: after each row, so that an early end loses nothing."""
    shown = report.plain(options) | {"model": [str(model) for model in options.model]}
    flags = " ".join(flags_of(options, options.model[0]).arguments()[2:])
    report.write_json(
        options.out / "results.json",
        {"options": shown, "flags": flags, "results": [_plain(result) for result in results]},
    )
    here = machine()
    where = f"{here['cores']} cores, {here['system']} {here['machine']}"
    text = f"Measured {here['when']}, {where}; both servers with `{flags}`.\n\n"
    text += "Median of the rounds, and in brackets the least and the greatest.\n\n"
    text += report.markdown(summary(results))
    text += "\nKV caches:\n\n" + "\n".join(layouts(results)) + "\n"
    (options.out / "results.md").write_text(text, encoding="utf-8")
    pictures.write(options.out / "results.json", options.out)


def _plain(result: Result) -> dict[str, Any]:
    whole = attrs.asdict(result)
    for verdict in whole["verdicts"]:
        verdict["check"]["target"] = Check(**verdict["check"]).target
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a target is not met or was not measured."""
    options = parse(argv)
    exit_on_sigterm()
    note = progress(options.quiet)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.draw is not None:
        print(*pictures.write(options.draw, options.out), sep="\n")
        return 0
    end = time.monotonic() + options.budget
    results: list[Result] = []
    jobs = jobs_of(options)
    for number, (model, row) in enumerate(jobs):
        now = time.monotonic()
        until = now + max(0.0, end - now) / (len(jobs) - number)
        note(f"{model.stem}, {row.key}: {until - now:.0f} s")
        try:
            if now >= end:
                raise TargetError(f"the {options.budget:g} s of --budget were used up before")
            with busy(options.busy):
                results += run_row(options, model, row, until, note)
        except Exception as error:  # a failed row does not stop the others
            note(f"  failed: {error!r}")
            text = f"{type(error).__name__}: {error}"
            results.append(Result(model=model.stem, row=row.key, scenario=row.key, error=text))
        write(options, results)
    print(report.markdown(summary(results)), *layouts(results), sep="\n")
    outcomes = [verdict.outcome for result in results for verdict in result.verdicts]
    failed = sum(bool(result.error) for result in results)
    missed, other = outcomes.count(MISSED), len(outcomes)
    other -= missed + outcomes.count(MET)
    print(f"{outcomes.count(MET)} met, {missed} missed, {other} not measured, {failed} rows failed")
    return 0 if outcomes.count(MET) == len(outcomes) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
