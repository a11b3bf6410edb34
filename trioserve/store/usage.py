"""The usage of API keys: `Used` by `UsageRow`, which is a day, a key and a model."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any, Literal, TypeAlias

import attrs

#: The days that rows are kept.
KEPT_DAYS = 400

#: The columns that usage is summed by.
Group: TypeAlias = Literal["day", "key", "model"]
GROUPS: Sequence[Group] = ("day", "key", "model")


@attrs.frozen(order=True)
class UsageRow:
    """A day, an API key and a model whose usage is counted."""

    day: str  # in UTC, as ``2026-01-31``
    key: str  # the name of the API key; empty for clients without a key
    model: str


@attrs.define
class Used:
    """Usage. `seconds` are those of requests, from submission to the end."""

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


def day_of(moment: float) -> str:
    """The day of a Unix time, in UTC."""
    return datetime.fromtimestamp(moment, UTC).date().isoformat()


def day_before(day: str, n_days: int) -> str:
    """The day that is some days before another one, or the first of all days."""
    number = max(date.fromisoformat(day).toordinal() - n_days, 1)
    return date.fromordinal(number).isoformat()


def add_usage(connection: sqlite3.Connection, counted: Mapping[UsageRow, Used]) -> None:
    """Add to what is stored."""
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in AMOUNTS)
    connection.executemany(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (day, key, model) DO UPDATE SET {sums}",
        [(*attrs.astuple(row), *attrs.astuple(used)) for row, used in counted.items()],
    )


@attrs.frozen(kw_only=True)
class UsageQuery:
    """A query for usage: that of some days, summed by groups, in the order of the groups."""

    start: str  # the first day
    end: str  # the last day
    groups: Sequence[Group] = GROUPS
    key: str | None = None  # the name of the only API key to read
    after: Sequence[str] | None = None  # the values of the groups in the entry before the first one
    newest: bool = False  # in descending order
    limit: int = -1  # the most entries; below 0: all

    def read(self, connection: sqlite3.Connection) -> list[dict[str, Any]]:
        """Read the entries: the values of the groups, where others are None, and the sums."""
        where, values = "day >= ? AND day <= ?", [self.start, self.end]
        if self.key is not None:
            where += " AND key = ?"
            values.append(self.key)
        columns = ", ".join(self.groups)
        if self.after is not None:
            places = ", ".join("?" * len(self.after))
            where += f" AND ({columns}) {'<' if self.newest else '>'} ({places})"
            values += self.after
        sums = ", ".join(f"sum({name})" for name in AMOUNTS)
        order = ", ".join(f"{name} {'DESC' if self.newest else 'ASC'}" for name in self.groups)
        found = connection.execute(
            f"SELECT {columns}, {sums} FROM usage WHERE {where} "
            f"GROUP BY {columns} ORDER BY {order} LIMIT ?",
            (*values, self.limit),
        )
        names, nothing = (*self.groups, *AMOUNTS), dict.fromkeys(map(str, GROUPS))
        return [
            {**nothing, **dict(zip(names, row, strict=True)), "seconds": round(row[-1], 3)}
            for row in found
        ]


def erase_usage(connection: sqlite3.Connection, key: str) -> int:
    """Delete what is stored of a key, by its name; returns how many rows there were."""
    return connection.execute("DELETE FROM usage WHERE key = ?", (key,)).rowcount


def expire_usage(connection: sqlite3.Connection, now: float) -> None:
    """Delete the rows that were kept for `KEPT_DAYS`."""
    first = day_before(day_of(now), KEPT_DAYS)
    connection.execute("DELETE FROM usage WHERE day < ?", (first,))
