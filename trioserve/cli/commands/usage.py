"""``trioserve usage``: what API keys have used, by day and model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, cast
from urllib.parse import quote

import msgspec

from trioserve.cli.address import Address, take_value
from trioserve.cli.commands import table, take
from trioserve.cli.local_server import asked
from trioserve.cli.signals import run_until_signal
from trioserve.config import readers
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, UnavailableError
from trioserve.remote.answers import Count, Text

_DAYS = 30

#: Entries of a page that a server is asked for, and how many pages it may have.
_PAGE = 1000
_MAX_PAGES = 1000

_HEADINGS = {"day": "DAY", "key": "KEY", "model": "MODEL"}
_NUMBERS = {
    "requests": "REQUESTS",
    "input_tokens": "INPUT",
    "cached_input_tokens": "CACHED",
    "output_tokens": "OUTPUT",
    "seconds": "SECONDS",
}


class _Row(msgspec.Struct):
    """The counts of a server; the fields are those of `_HEADINGS` and `_NUMBERS`."""

    day: Text | None
    key: Text | None
    model: Text | None
    requests: Count
    input_tokens: Count
    cached_input_tokens: Count
    output_tokens: Count
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Usage(msgspec.Struct):
    data: Annotated[list[_Row], msgspec.Meta(max_length=_PAGE)]
    has_more: bool = False
    last_id: Text | None = None


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a variable is invalid.
        StoreError: the store cannot be read.
        TrioServeError: no server answers, or the answer is invalid.
    """
    from trioserve.store.usage import Group, UsageQuery, day_before, day_of

    words, switches = take(argv, "--json")
    given: dict[str, str | None] = {}
    for flag in ("--store", "--url", "--since", "--by"):
        given[flag], words = take_value(flag, words)
    groups = _groups(given["--by"] or "day,key,model")
    end = day_of(time.time())
    start = day_before(end, _days(given["--since"]) - 1)
    if (store := given["--store"]) is None:
        config = parse(words, environ).config
        rows = _ask(Address.of(given["--url"], config), start, end, groups)
    elif words or given["--url"] is not None:
        raise ConfigError(f"usage: --store takes no {' '.join(words) or '--url'} beside it")
    else:
        from trioserve.store.database import reading

        query = UsageQuery(start=start, end=end, groups=cast(Sequence[Group], groups))
        with reading(store) as connection:
            rows = query.read(connection)
    if "--json" in switches:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        print(_table(rows, groups), end="")
    return 0


def _groups(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if not {*names} <= {*_HEADINGS}:
        raise ConfigError("usage: --by must be day, key or model, or several of them, with commas")
    return names


def _days(text: str | None) -> int:
    """Read the number of days, today included."""
    try:
        days = _DAYS if text is None else readers.integer(text)
    except ValueError:
        days = 0
    if not 1 <= days <= 10_000:
        raise ConfigError(f"usage: --since must be a number of days, not {text!r}")
    return days


def _ask(address: Address, start: str, end: str, groups: Sequence[str]) -> list[dict[str, Any]]:
    path = f"/v1/usage?start={start}&end={end}&group_by={','.join(groups)}&limit={_PAGE}"
    rows: list[_Row] = []

    async def look() -> None:
        after = ""
        for _ in range(_MAX_PAGES):
            page = await asked(address, path + after, _Usage)
            rows.extend(page.data)
            if not page.has_more:
                return
            after = f"&after={quote(page.last_id or '', safe='')}"
        raise UnavailableError(f"{address} has more than {_MAX_PAGES * _PAGE} entries of usage.")

    run_until_signal(look)
    return [msgspec.structs.asdict(row) for row in rows]


def _table(rows: Iterable[Mapping[str, Any]], groups: Sequence[str]) -> str:
    head = [*(_HEADINGS[name] for name in groups), *_NUMBERS.values()]
    cells = [
        [
            *(one[name] or "-" for name in groups),
            *(f"{one[name]:.1f}" if name == "seconds" else str(one[name]) for name in _NUMBERS),
        ]
        for one in rows
    ]
    return table([head, *cells], right=range(len(groups), len(head)))
