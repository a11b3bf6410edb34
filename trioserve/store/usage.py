"""What API keys have used: `Used` by `UsageRow`, which is a day, a key and a model."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

import attrs

#: How many days rows are kept.
KEPT_DAYS = 400

#: What usage is summed by.
Group: TypeAlias = Literal["day", "key", "model"]
GROUPS: Sequence[Group] = ("day", "key", "model")


@attrs.frozen(order=True)
class UsageRow:
    """What usage is counted for.

    Attributes:
        day: in UTC, as ``2026-01-31``.
        key: the name of the API key; empty for clients without a key.
        model: the name of the model.
    """

    day: str
    key: str
    model: str


@attrs.define
class Used:
    """What was used. `seconds` are those of requests, from submission to the end."""

    requests: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0  # of the input tokens, those that were in a cache
    output_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Used) -> None:
        """Add what else was used."""
        self.requests += other.requests
        self.input_tokens += other.input_tokens
        self.cached_input_tokens += other.cached_input_tokens
        self.output_tokens += other.output_tokens
        self.seconds += other.seconds

    @property
    def tokens(self) -> int:
        """The tokens that a daily budget counts."""
        return self.input_tokens + self.output_tokens


#: The columns with numbers, in the order of `Used`.
AMOUNTS = tuple(each.name for each in attrs.fields(Used))


def usage_in(fields: Mapping[str, Any]) -> tuple[UsageRow, Used]:
    """Read usage from its fields; `usage_out` wrote them."""
    row = UsageRow(*(fields[name] for name in GROUPS))
    return row, Used(*(fields[name] for name in AMOUNTS))


def usage_out(row: UsageRow, used: Used) -> dict[str, Any]:
    """Write usage as an object for JSON."""
    return attrs.asdict(row) | attrs.asdict(used)


def day_of(moment: float) -> str:
    """The day of a Unix time, in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")


def day_before(day: str, n_days: int) -> str:
    """The day that is some days before another one."""
    return (datetime.strptime(day, "%Y-%m-%d") - timedelta(n_days)).strftime("%Y-%m-%d")


def add_usage(connection: sqlite3.Connection, counted: Mapping[UsageRow, Used]) -> None:
    """Add to what is stored."""
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in AMOUNTS)
    connection.executemany(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (day, key, model) DO UPDATE SET {sums}",
        [(*attrs.astuple(row), *attrs.astuple(used)) for row, used in counted.items()],
    )


def read_usage(
    connection: sqlite3.Connection, start: str, end: str, key: str | None = None
) -> Iterator[tuple[UsageRow, Used]]:
    """Read what was used from one day to another one, both included, by all keys or by one."""
    where, values = "day >= ? AND day <= ?", [start, end]
    if key is not None:
        where += " AND key = ?"
        values.append(key)
    for row in connection.execute(f"SELECT * FROM usage WHERE {where}", values):
        yield UsageRow(*row[:3]), Used(*row[3:])


def erase_usage(connection: sqlite3.Connection, key: str) -> int:
    """Delete what is stored of a key, by its name; returns how many rows there were."""
    return connection.execute("DELETE FROM usage WHERE key = ?", (key,)).rowcount


def expire_usage(connection: sqlite3.Connection, now: float) -> None:
    """Delete the rows that were kept for `KEPT_DAYS`."""
    first = day_before(day_of(now), KEPT_DAYS)
    connection.execute("DELETE FROM usage WHERE day < ?", (first,))


def summed(
    counted: Iterable[tuple[UsageRow, Used]], groups: Sequence[Group]
) -> list[dict[str, Any]]:
    """Sum usage by some of `GROUPS`; the others are None. The order is that of the groups."""
    sums: dict[tuple[str, ...], Used] = {}
    for row, used in counted:
        sums.setdefault(tuple(getattr(row, name) for name in groups), Used()).add(used)
    nothing = dict.fromkeys(GROUPS)
    return [
        nothing | dict(zip(groups, names, strict=True)) | _written(used)
        for names, used in sorted(sums.items(), key=lambda item: item[0])
    ]


def _written(used: Used) -> dict[str, Any]:
    return attrs.asdict(used) | {"seconds": round(used.seconds, 3)}
