"""Send random requests to trioserve and to llama-server, and compare what they answer.

    python -m tests.compat --llama-server PATH --requests 200 --seed 1

Starts both with the same model and flags; `--trioserve-url` and `--llama-server-url` name servers
that run already, with the same model, alias and number of slots. What differs beyond ids, times
and the documented differences (`KNOWN`) is printed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks.report import bounded
from benchmarks.servers import (
    Flags,
    Target,
    TargetError,
    all_running,
    llama_server,
    target_at,
    trioserve,
)
from tests.compat.calls import Call, draw
from tests.compat.diff import Answer, Difference, differences
from tests.compat.known import KNOWN

_MODEL = Path(__file__).parents[2] / "trioserve/models/bundled.gguf"
_ALIAS = "compared"


@attrs.frozen
class Pair:
    """The two servers."""

    ours: Target
    theirs: Target


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add(
        "--llama-server",
        type=Path,
        default=os.environ.get("LLAMA_SERVER") or None,
        help="the program to compare with; $LLAMA_SERVER",
    )
    add("--model", type=Path, default=_MODEL, help="the GGUF file that both serve")
    add("--trioserve-url", help="a server that runs already")
    add("--llama-server-url", help="the same")
    add("--requests", type=bounded(1, 100_000), default=200)
    add("--seed", type=int, default=1, help="which requests are drawn")
    add("--show", type=bounded(1, 1000), default=20, help="differing requests to print")
    options = parser.parse_args(argv)
    if (options.trioserve_url is None) != (options.llama_server_url is None):
        parser.error("--trioserve-url and --llama-server-url go together")
    if options.trioserve_url is None and options.llama_server is None:
        parser.error("nothing to compare with: no --llama-server and no --llama-server-url")
    return options


@contextlib.contextmanager
def pair_of(options: argparse.Namespace) -> Iterator[Pair]:
    """Find the two servers, or run them for the length of the block.

    Raises:
        TargetError: one of them is not there, or does not start.
    """
    if options.trioserve_url is not None:
        yield Pair(target_at(options.trioserve_url), target_at(options.llama_server_url))
        return
    flags = Flags(
        model=options.model.resolve(),
        threads=1,
        slots=4,
        more=("--alias", _ALIAS, "-c", "4096", "--kv-unified"),
    )
    commands = [trioserve("--stream-interval-ms 0"), llama_server(options.llama_server)]
    with (
        tempfile.TemporaryDirectory() as logs,
        all_running(commands, flags, Path(logs)) as (ours, theirs),
    ):
        yield Pair(ours, theirs)


def ask(target: Target, call: Call, timeout: float = 60.0) -> Answer:
    """Send a request.

    Raises:
        TargetError: the server does not answer.
    """
    address = target.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    data = call.data()
    headers = {"Content-Type": "application/json"} if data is not None else {}
    try:
        connection.request(call.method, call.path, data, headers)
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise TargetError(f"{target.name}: {call}: {error!r}") from error
    finally:
        connection.close()
    return Answer(response.status, response.getheader("Content-Type", ""), body)


def compare(pair: Pair, call: Call, seen: Counter[str]) -> list[Difference]:
    """Ask both the same, and return what differs and is not known; counts in `seen` what is.

    Raises:
        TargetError: one of them does not answer.
    """
    ours, theirs = ask(pair.ours, call).value(), ask(pair.theirs, call).value()
    unknown = []
    for difference in differences(ours, theirs):
        known = next((each for each in KNOWN if each.covers(call, difference)), None)
        if known is None:
            unknown.append(difference)
        elif known.why:
            seen[known.why] += 1
    return unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    options = parse(argv)
    seen: Counter[str] = Counter()
    failed = 0
    try:
        with pair_of(options) as pair:
            for call in draw(options.requests, options.seed):
                unknown = compare(pair, call, seen)
                failed += bool(unknown)
                if unknown and failed <= options.show:
                    print(f"\n[{call.kind}] {call}")
                    for difference in unknown[:8]:
                        print(f"    {difference}")
    except TargetError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\n{options.requests} requests, {failed} differ.")
    for why, count in seen.most_common():
        print(f"{count:6} known: {why}")
    return 1 if failed else 0
