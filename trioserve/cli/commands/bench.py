"""``trioserve bench``: the speed of a server, by depth and by clients, alone or beside another."""

from __future__ import annotations

import itertools
import json
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import attrs

from trioserve.bench import report, speed
from trioserve.bench.client import Server
from trioserve.cli.address import Address
from trioserve.cli.local_server import client_of, models_at, named, only, server_at
from trioserve.cli.options import Arguments
from trioserve.cli.output import note, write_file
from trioserve.cli.progress import ProgressReport
from trioserve.cli.signals import run_until_signal
from trioserve.config import Config
from trioserve.errors import ConfigError


@attrs.define
class Measured:
    """The model of each server, and the results so far."""

    models: dict[str, str] = attrs.field(factory=dict)
    results: list[report.Result] = attrs.field(factory=list)


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    config = given.parsed().config
    lengths = ("n_prompt", "n_gen", "n_depth", "clients")
    tests = speed.workloads_of(*(given[name] for name in lengths))
    if not tests:
        raise ConfigError("bench has nothing to measure: -p and -n are 0")
    measured = Measured()
    try:
        return run_until_signal(partial(_measure, given, tests, config, measured))
    finally:  # an early end loses nothing
        if measured.results:
            _write(given, measured)


# -- measuring


async def _measure(
    given: Arguments, tests: Sequence[speed.Workload], config: Config, measured: Measured
) -> None:
    output, rounds = given["output"], given["repetitions"]
    async with servers_of(given, config) as servers:
        measured.models |= {server.name: server.model for server in servers}
        table = report.Table(is_compared=len(servers) > 1)
        if output == "md":
            print(f"{_named(measured.models)}\n\n{table.head()}", end="", flush=True)
        n_all, numbers = len(tests) * rounds * len(servers), itertools.count()
        with ProgressReport(sys.stderr) as progress:

            def tell(line: str) -> None:
                progress.tell(line, next(numbers), n_all, "measurements")

            for test in tests:
                samples = await speed.interleave(servers, test, rounds, tell)
                progress.clear()
                measured.results.append(report.Result(test, samples))
                _show(output, table, measured.results[-1])


@asynccontextmanager
async def servers_of(given: Arguments, config: Config) -> AsyncIterator[Sequence[Server]]:
    """Give the servers for the length of a block: one at a URL or of the flags, and the other.

    Raises:
        ConfigError: a server has several models, and none is named.
        TrioServeError: one of them cannot be started, or does not answer.
    """
    most, url = max(given["clients"]), given["url"]
    more = [] if most <= config.parallel else ["--parallel", str(most)]
    async with AsyncExitStack() as stack:
        serving = server_at(url, [*more, *given.flags], config, given.environ)
        address = await stack.enter_async_context(serving)
        own = "trioserve" if url is None else str(address)
        addresses = [(own, address, config.model_named if url else None)]
        if given["against"] is not None:
            other = Address.of(given["against"], config)
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
            name, own_seed = name.removeprefix("http://"), f"{seed} {len(servers)}"
            server = Server(name=name, client=client, model=chosen, seed=own_seed)
            servers.append(await server.calibrated())
        yield servers


# -- results


def _show(output: str, table: report.Table, result: report.Result) -> None:
    if output == "md":
        print(table.lines(result), end="", flush=True)
    elif output == "jsonl":
        for record in report.records(result):
            print(json.dumps(record), flush=True)
    for text in result.notes():
        note(text)


def _named(models: Mapping[str, str]) -> str:
    return "; ".join(f"{server}: {model}" for server, model in models.items())


def _write(given: Arguments, measured: Measured) -> None:
    results = measured.results
    plain = {"models": measured.models, **report.plain(results, given.options)}
    whole = json.dumps(plain, indent=1, default=str) + "\n"  # of paths
    output, file, drawing = given["output"], given["json"], given["svg"]
    if output == "csv":
        print(report.csv_text(results), end="")
    elif output == "json":
        print(whole, end="")
    if file is not None:
        write_file(file, whole)
    if drawing is not None:
        here = report.machine()
        caption = (
            f"{_named(measured.models)}. Measured {here['when'][:10]} on {here['cores']} "
            f"cores, {here['system']} {here['machine']}. "
            f"Medians of {given['repetitions']} rounds; bands and thin lines reach from "
            "the least to the greatest."
        )
        write_file(drawing, report.picture(results, "trioserve bench", caption))
