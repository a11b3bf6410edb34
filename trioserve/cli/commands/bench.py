"""``trioserve bench``: the speed of a server, by depth and by clients, alone or beside another."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import attrs

from trioserve.bench import report, speed
from trioserve.bench.client import Server
from trioserve.cli.address import Address, take_value
from trioserve.cli.commands import parse_flags
from trioserve.cli.local_server import client_of, models_at, named, only, started
from trioserve.cli.progress import ProgressReport
from trioserve.cli.signals import run_until_signal
from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.whole_numbers import whole_number

_OUTPUTS = ("md", "csv", "json", "jsonl")
_MAX = 10_000_000


@attrs.frozen(kw_only=True)
class Options:
    """What is measured, and where the results go."""

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    n_depth: tuple[int, ...] = (0,)
    clients: tuple[int, ...] = (1,)
    repetitions: int = 5
    output: str = "md"
    url: str | None = None
    against: str | None = None
    json: Path | None = None
    svg: Path | None = None


@attrs.define
class Measured:
    """What is known so far: the model of each server, and the results."""

    models: dict[str, str] = attrs.field(factory=dict)
    results: list[report.Result] = attrs.field(factory=list)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a variable is invalid, or there is nothing to measure.
        TrioServeError: a server cannot be started or reached, or a request fails.
    """
    options, flags = take_options(argv)
    parsed = parse_flags(flags, environ)
    tests = speed.workloads_of(options.n_prompt, options.n_gen, options.n_depth, options.clients)
    if not tests:
        raise ConfigError("bench has nothing to measure: -p and -n are 0")
    measured = Measured()
    work = partial(_measure, options, tests, parsed.config, flags, environ, measured)
    try:
        return run_until_signal(work)
    finally:  # an early end loses nothing
        if measured.results:
            _write(options, measured)


# -- arguments


def take_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Take the command's own arguments out; returns them, and the flags of the server.

    Raises:
        ConfigError: one is invalid.
    """
    words, found = list(argv), {}
    readers: dict[str, tuple[Callable[[str, str], object], tuple[str, ...]]] = {
        "n_prompt": (partial(numbers, 0), ("--n-prompt", "-p", "-npp")),
        "n_gen": (partial(numbers, 0), ("--n-gen", "-n", "-ntg")),
        "n_depth": (partial(numbers, 0), ("--n-depth", "-d")),
        "clients": (partial(numbers, 1), ("--clients", "-npl")),
        "repetitions": (number, ("--repetitions", "-r")),
        "output": (_output, ("--output", "-o")),
        "url": (_as_it_is, ("--url",)),
        "against": (_as_it_is, ("--against",)),
        "json": (writable, ("--json",)),
        "svg": (writable, ("--svg",)),
    }
    for field, (read, names) in readers.items():
        for name in names:
            value, words = take_value(name, words)
            if value is not None:
                found[field] = read(name, value)
    return Options(**found), words  # type: ignore[arg-type]


def numbers(least: int, flag: str, value: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them.

    Raises:
        ConfigError: they are none, or less than `least`.
    """
    given = [whole_number(part) for part in value.split(",")]
    read = tuple(dict.fromkeys(one for one in given if one is not None))
    if None in given:
        raise ConfigError(f"{flag} takes whole numbers with commas between them, not {value!r}")
    if not all(least <= one <= _MAX for one in read):
        raise ConfigError(f"{flag} must be between {least} and {_MAX}, not {value}")
    return read


def number(flag: str, value: str) -> int:
    """Read a whole number from 1 on. Raises ConfigError: it is none."""
    if whole_number(value) is None:
        raise ConfigError(f"{flag} takes one whole number, not {value!r}")
    return numbers(1, flag, value)[0]


def _output(flag: str, value: str) -> str:
    if value not in _OUTPUTS:
        raise ConfigError(f"{flag} must be one of {', '.join(_OUTPUTS)}, not {value!r}")
    return value


def _as_it_is(_flag: str, value: str) -> str:
    return value


def writable(flag: str, value: str) -> Path:
    """Read the path of a file that is written later. Raises ConfigError: it cannot be."""
    path = Path(value)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {value} cannot be written")
    return path


# -- measuring


async def _measure(
    options: Options,
    tests: Sequence[speed.Workload],
    config: Config,
    flags: Sequence[str],
    environ: Mapping[str, str],
    measured: Measured,
) -> None:
    """Measure all tests, and print each result at once."""
    async with servers_of(options, config, flags, environ) as servers:
        measured.models |= {server.name: server.model for server in servers}
        table = report.Table(is_compared=len(servers) > 1)
        if options.output == "md":
            print(f"{_named(measured.models)}\n\n{table.head()}", end="", flush=True)
        with ProgressReport(sys.stderr, n_log_lines=0) as progress:
            for i, test in enumerate(tests):

                def note(line: str, share: float = i / len(tests)) -> None:
                    progress.tell(share, f"{line}\x1b[K", "measuring")

                samples = await speed.interleave(servers, test, options.repetitions, note)
                progress.end()
                measured.results.append(report.Result(test, samples))
                _show(options.output, table, measured.results[-1])


@asynccontextmanager
async def servers_of(
    options: Options, config: Config, flags: Sequence[str], environ: Mapping[str, str]
) -> AsyncIterator[Sequence[Server]]:
    """Give the servers for the length of a block: one at a URL or of the flags, and the other.

    Raises:
        ConfigError: a server has several models, and none is named.
        TrioServeError: one of them cannot be started, or does not answer.
    """
    async with AsyncExitStack() as stack:
        if options.url is not None:
            address = Address.of(options.url, config)
        else:
            most = max(options.clients)
            more = [] if most <= config.parallel else ["--parallel", str(most)]
            address = await stack.enter_async_context(started([*more, *flags], config, environ))
        own = "trioserve" if options.url is None else str(address)
        addresses = [(own, address, config.model_named if options.url else None)]
        if options.against is not None:
            other = Address.of(options.against, config)
            addresses.append((str(other), other, None))
        if len({str(one) for _, one, _ in addresses}) < len(addresses):
            raise ConfigError("--against names the same server as --url")
        seed = secrets.token_hex(4)
        servers: list[Server] = []
        for name, one, model in addresses:
            models = await models_at(one)
            chosen = only(models) if model is None else named(models, model)
            if chosen is None:
                raise ConfigError(f"{one} has no model {model}")
            # Other servers may close a kept connection just as the next request goes out.
            client = await stack.enter_async_context(client_of(one, n_kept=0))
            server = Server(
                name=name.removeprefix("http://"),
                client=client,
                model=chosen,
                seed=f"{seed} {len(servers)}",
            )
            servers.append(await server.calibrated())
        yield servers


# -- results


def _show(output: str, table: report.Table, result: report.Result) -> None:
    """Print a result, if the form has one result after the other."""
    if output == "md":
        print(table.lines(result), end="", flush=True)
    elif output == "jsonl":
        for record in report.records(result):
            print(json.dumps(record), flush=True)
    for note in result.notes():
        print(f"trioserve: {note}", file=sys.stderr)


def _named(models: Mapping[str, str]) -> str:
    return "; ".join(f"{server}: {model}" for server, model in models.items())


def _write(options: Options, measured: Measured) -> None:
    """Print what comes at the end, and write the files."""
    results = measured.results
    plain = {"models": measured.models, **report.plain(results, attrs.asdict(options))}
    whole = json.dumps(plain, indent=1, default=str) + "\n"  # of paths
    if options.output == "csv":
        print(report.csv_text(results), end="")
    elif options.output == "json":
        print(whole, end="")
    try:
        if options.json is not None:
            options.json.write_text(whole, encoding="utf-8")
        if options.svg is not None:
            here = report.machine()
            caption = (
                f"{_named(measured.models)}. Measured {here['when'][:10]} on {here['cores']} "
                f"cores, {here['system']} {here['machine']}. "
                f"Medians of {options.repetitions} rounds; bands and thin lines reach from "
                "the least to the greatest."
            )
            drawn = report.picture(results, "trioserve bench", caption)
            options.svg.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
