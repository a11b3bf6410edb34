"""``trioserve usage``: what API keys have used, by day and model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, cast
from urllib.parse import quote

import msgspec

from trioserve.cli.address import Address
from trioserve.cli.local_server import asked
from trioserve.cli.options import Arguments
from trioserve.cli.output import Column, print_list
from trioserve.cli.signals import run_until_signal
from trioserve.config import readers
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, UnavailableError
from trioserve.remote.answers import Count, Text

#: Entries of a page that a server is asked for, and how many pages it may have.
_PAGE = 1000
_MAX_PAGES = 1000

_GROUPS = ("day", "key", "model")
_NUMBERS = (
    Column("requests", right=True),
    Column("input_tokens", right=True, heading="INPUT"),
    Column("cached_input_tokens", right=True, heading="CACHED"),
    Column("output_tokens", right=True, heading="OUTPUT"),
    Column("seconds", "{:.1f}".format, right=True),
)


class _Row(msgspec.Struct):
    """The counts of a server; the fields are those of `_GROUPS` and `_NUMBERS`."""

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


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    from trioserve.store.usage import Group, UsageQuery, day_before, day_of

    groups = list(dict.fromkeys(given["by"].split(",")))
    if not {*groups} <= {*_GROUPS}:
        raise ConfigError("usage: --by must be day, key or model, or several of them, with commas")
    end = day_of(time.time())
    start = day_before(end, _days(given["since"]) - 1)
    if (store := given["store"]) is None:
        config = parse(given.flags, given.environ).config
        rows = _ask(Address.of(given["url"], config), start, end, groups)
    elif given.flags or given["url"] is not None:
        words = " ".join(given.flags) or "--url"
        raise ConfigError(f"usage: --store takes no {words} beside it")
    else:
        from trioserve.store.database import reading

        query = UsageQuery(start=start, end=end, groups=cast(Sequence[Group], groups))
        with reading(store) as connection:
            rows = query.read(connection)
    groups_first = [Column(name, lambda text: text or "-", missing="-") for name in groups]
    print_list([*groups_first, *_NUMBERS], rows, as_json=given["json"])
    return 0


def _days(text: str) -> int:
    try:
        days = readers.integer(text)
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
