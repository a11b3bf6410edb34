"""The whole table of targets, measured and judged: trioserve beside llama-server.

    python -m benchmarks.proof --model 25m-152k.gguf --model 110m-32k.gguf --out DIR
    python -m benchmarks.proof --draw DIR/results.json --out docs

Each row starts both servers afresh, measures them in turn, A B, B A, and reports each figure with
its target, and whether it is met. A row that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import attrs

from benchmarks import pictures, report
from benchmarks.cancel import models_folder
from benchmarks.driver import Address
from benchmarks.report import Note, bounded, in_turn, progress, seconds, warm_up
from benchmarks.rows import DIRECT, MET, MISSED, QUICK, ROUTER, Row, Sizes, Verdict, judge, rows
from benchmarks.scenarios import Settings, first_requests
from benchmarks.servers import (
    Command,
    Flags,
    Target,
    TargetError,
    all_running,
    busy,
    exit_on_sigterm,
    layout_of,
    llama_server,
    running,
    trioserve,
)
from benchmarks.stats import Sample
from benchmarks.wire import Shape
from trioserve.bench.report import machine
from trioserve.models import BUNDLED


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
    base: str = ""  # of ratios


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = report.arguments("proof", __doc__)
    table = rows(Sizes())
    keys = [row.key for row in table]
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        action="append",
        default=[],
        help="a GGUF file, by default the bundled one; repeatable: rows of one model use the last",
    )
    add("--draw", type=Path, help="a results.json: only draw its pictures again, into --out")
    add("--out", type=Path, default=Path("results"), help="folder for results, pictures and logs")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER") or None)
    add("--rows", default="table", help=f"table, all, or some of {', '.join(keys)}; with commas")
    add("--quick", action="store_true", help="very small sizes: does it work, not how well")
    add("--rounds", type=bounded(1, 100), default=5, help="runs of each server, if time allows")
    add("--budget", type=seconds, default=1450.0, help="seconds for all; rounds are left out")
    add("--max-time", type=seconds, default=240.0, help="seconds for one run of one server")
    add("-t", "--threads", type=bounded(1, 512), default=None, help="default: each server's own")
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--both-args", default="", help="more flags for both, as one string")
    add("--trioserve-args", default="", help="more flags for trioserve, as one string")
    add("--llama-server-args", default="", help="more flags for llama-server, as one string")
    add("--also", action="append", default=[], metavar="FLAGS", help="trioserve with these, too")
    add("--start-timeout", type=seconds, default=60.0, help="seconds until /health answers 200")
    add("--busy", type=bounded(0, 512), default=0, help="processes that keep a core busy meanwhile")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    options = parser.parse_args(argv)
    named = {"all": keys, "table": [row.key for row in table if row.in_table]}
    options.rows = named.get(options.rows) or options.rows.split(",")
    for key in options.rows:
        if key not in keys:
            parser.error(f"no row is called {key!r}; there are {', '.join(keys)}")
    options.model = options.model or [BUNDLED]
    for path in (*options.model, options.draw):
        if path is not None and not path.is_file():
            parser.error(f"{path} is no file")
    return options


def jobs_of(options: argparse.Namespace) -> list[tuple[Path, Row]]:
    """Return what is run: rows of every model with each, the others with the last or bundled."""
    chosen = [row for row in rows(QUICK if options.quick else Sizes()) if row.key in options.rows]
    *others, last = options.model
    jobs = [(model, row) for model in others for row in chosen if row.every_model]
    return jobs + [(BUNDLED if row.bundled else last, row) for row in chosen]


def commands_of(options: argparse.Namespace, row: Row, model: Path, folder: Path) -> list[Command]:
    """Return how the servers of a row are started, the base of the ratios last.

    Raises:
        TargetError: llama-server is not there.
    """
    ours = f"{options.trioserve_args} {row.trioserve_args}"
    if row.ours == ROUTER:
        models = shlex.quote(str(models_folder(folder, model)))
        direct = shlex.quote(str(model.resolve()))
        return [
            trioserve(f"{ours} --models-dir {models}", ROUTER),
            trioserve(f"{ours} -m {direct}", DIRECT),
        ]
    also = [trioserve(f"{ours} {more}", f"{row.ours} {more}") for more in options.also]
    theirs = []
    if options.llama_server is not None:
        theirs.append(llama_server(options.llama_server, options.llama_server_args))
    return [trioserve(ours), *also, *theirs]


@contextmanager
def servers_of(
    options: argparse.Namespace, row: Row, model: Path, logs: Path
) -> Iterator[tuple[list[Target], Settings]]:
    """Run the servers of a row, or make what starts them; give them with the settings.

    Raises:
        TargetError: a server could not be started, or does not answer.
    """
    logs.mkdir(parents=True, exist_ok=True)
    commands = {one.name: one for one in commands_of(options, row, model, logs)}
    flags = flags_of(options, row, model)
    sizes = QUICK if options.quick else Sizes()
    settings = Settings(
        shape=Shape(max_tokens=sizes.max_tokens), slots=options.slots, max_time=options.max_time
    )

    def start(target: Target) -> AbstractContextManager[Target]:
        log = logs / f"{target.name}.log"
        return running(commands[target.name], flags, log, start_timeout=options.start_timeout)

    if row.fresh:
        targets = [Target(name, Address("127.0.0.1", 0)) for name in commands]
        for target in targets:
            with start(target):  # makes the file known, and the page cache warm
                pass
        yield targets, attrs.evolve(settings, start=start)
        return
    timeout = options.start_timeout
    with all_running(list(commands.values()), flags, logs, start_timeout=timeout) as targets:
        settings = settings.fit(targets[-1])
        if row.generates:
            warm_up(targets, first_requests(settings))
        else:
            warm_up(targets, row.cases[0].scenario(settings))
        yield targets, settings


def run_row(
    options: argparse.Namespace, model: Path, row: Row, until: float, note: Note
) -> list[Result]:
    """Run the scenarios of a row on its servers, and judge them.

    Raises:
        TargetError: a server could not be started, or does not answer.
    """
    logs = options.out / "logs" / f"{model.stem}-{row.key}"
    results = []
    with servers_of(options, row, model, logs) as (targets, settings):
        for number, case in enumerate(row.cases):
            scenario, now = case.scenario(settings), time.monotonic()
            share = now + (until - now) / (len(row.cases) - number)
            samples = in_turn(targets, scenario, options.rounds, note, until=share)
            title = f"{model.stem}: {scenario.name}"
            print(report.table(title, scenario.metrics, samples), flush=True)
            results.append(
                Result(
                    model=model.stem,
                    row=row.key,
                    scenario=scenario.name,
                    samples=samples,
                    verdicts=tuple(
                        judge(check, samples, row.ours, row.base) for check in case.checks
                    ),
                    layouts={t.name: layout_of(logs / f"{t.name}.log") for t in targets},
                    base=row.base,
                )
            )
    return results


def flags_of(options: argparse.Namespace, row: Row, model: Path) -> Flags:
    """Return the flags that the servers share; the last of two that set the same counts."""
    more = shlex.split(f"{options.both_args} {row.both_args}")
    slots = 0 if "-np" in more else options.slots
    given = None if row.ours == ROUTER else model.resolve()
    return Flags(model=given, threads=options.threads, slots=slots, more=tuple(more))


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
                cell += f" ({result.base} {check.show(verdict.base)})"
            line = (result.scenario, check.text, check.target(result.base))
            lines.setdefault(line, {})[result.model] = cell
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
    threads = f" -t {options.threads}" if options.threads else ""
    flags = f"-np {options.slots}{threads} {options.both_args}".strip()
    content = {"flags": flags, "results": [_plain(result) for result in results]}
    report.write_json(options.out / "results.json", options, content)
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
    for verdict, known in zip(whole["verdicts"], result.verdicts, strict=True):
        verdict["check"]["target"] = known.check.target(result.base)
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
