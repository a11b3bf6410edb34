"""`Records`: what a store keeps, as functions that run in its thread, in a transaction.

A record has an owner, a body in JSON, and numbered parts on several sides, such as the items of the
input and of the output of a response. Ids are random, and a record is found by its owner only.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from trioserve.errors import StoreFullError
from trioserve.store.usage import expire_usage

#: Seconds before the time of the last use is written again.
_SOON = 3600.0


@attrs.frozen
class Record:
    """A record. `created` is a Unix time, and `is_open` says that its work is not over."""

    id: str
    kind: str
    owner: bytes
    created: float
    is_open: bool
    body: dict[str, Any]


@attrs.frozen
class Part:
    """A part of a record: its place on its side, its name, and its bytes."""

    n: int
    name: str
    body: bytes

    @classmethod
    def of(cls, n: int, name: str, value: Any) -> Part:
        """Make a part whose body is JSON."""
        return cls(n, name, encode(value))

    @property
    def value(self) -> Any:
        """The JSON of the body. Raises DatabaseError: it is damaged."""
        return _decoded(self.body)


def new_id(prefix: str, mark: str = "_") -> str:
    """Make an id that cannot be guessed."""
    return f"{prefix}{mark}{secrets.token_hex(16)}"


def encode(value: Any) -> bytes:
    """Write JSON as the store has it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, TypeError):  # SQLite has no checksums: its tables may be sound
        raise sqlite3.DatabaseError("its content is damaged") from None


class Records:
    """The records of a database.

    Args:
        connection: to the database. Transactions are the caller's.
        max_bytes: of all records. Beyond that, those of the owner with most are deleted, the ones
            that were not used for longest first.
        seconds: after which a record that was not used is deleted.
    """

    def __init__(self, connection: sqlite3.Connection, max_bytes: int, seconds: float) -> None:
        self._sql = connection.execute
        self._many = connection.executemany
        #: For what is no record, such as usage.
        self.connection = connection
        self._max_bytes, self._seconds = max_bytes, seconds

    # -- records

    def add(self, id: str, kind: str, owner: bytes, body: Any, *, is_open: bool = False) -> None:
        """Add a record. Raises StoreFullError."""
        data, now = encode(body), time.time()
        self.make_room(len(data))
        self._sql(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (id, kind, owner, now, now, is_open, len(data), data),
        )

    def find(self, id: str, kind: str, owner: bytes) -> Record | None:
        """Find a record of an owner, and note that it is in use."""
        row = self._sql(
            f"{_SELECT} WHERE id = ? AND kind = ? AND owner = ?", (id, kind, owner)
        ).fetchone()
        if row is not None:
            now = time.time()
            self._sql(
                "UPDATE records SET used = ? WHERE id = ? AND used < ?", (now, id, now - _SOON)
            )
        return None if row is None else _record(row)

    def listed(
        self, kind: str, owner: bytes, *, limit: int, after: str | None = None, newest: bool = True
    ) -> list[Record]:
        """List records of an owner, from the one after a record on."""
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        where, values = "kind = ? AND owner = ?", [kind, owner]
        if after is not None:
            found = "SELECT created, id FROM records WHERE id = ? AND owner = ?"
            where += f" AND (created, id) {sign} ({found})"
            values += [after, owner]
        rows = self._sql(
            f"{_SELECT} WHERE {where} ORDER BY created {order}, id {order} LIMIT ?",
            (*values, limit),
        )
        return [_record(row) for row in rows]

    def open_ones(self, kind: str) -> list[Record]:
        """The records of all owners whose work is not over, the oldest first."""
        rows = self._sql(f"{_SELECT} WHERE is_open AND kind = ? ORDER BY created, id", (kind,))
        return [_record(row) for row in rows]

    def change(self, id: str, body: Any, *, is_open: bool = False) -> None:
        """Replace the body of a record. Has no effect on one that was deleted."""
        data = encode(body)
        self._sql(
            "UPDATE records SET size = size + ? - length(body), body = ?, is_open = ?, used = ? "
            "WHERE id = ?",
            (len(data), data, is_open, time.time(), id),
        )

    def delete(self, id: str) -> None:
        """Delete a record and its parts, if it exists."""
        self._sql("DELETE FROM records WHERE id = ?", (id,))

    def erase(self, owner: bytes) -> int:
        """Delete all records of an owner; returns how many there were."""
        return self._sql("DELETE FROM records WHERE owner = ?", (owner,)).rowcount

    def expire(self) -> None:
        """Delete the records that were not used for too long, and old usage."""
        now = time.time()
        self._sql("DELETE FROM records WHERE is_open = 0 AND used < ?", (now - self._seconds,))
        expire_usage(self.connection, now)

    # -- parts

    def append(self, id: str, side: str, parts: Iterable[Part]) -> None:
        """Add parts to a record. Raises StoreFullError."""
        parts = list(parts)
        self.make_room(sum(len(each.body) for each in parts), id)
        self._many(
            "INSERT INTO parts VALUES (?, ?, ?, ?, ?)",
            [(id, side, each.n, each.name, each.body) for each in parts],
        )

    def parts(self, id: str, side: str, *, after: int = -1, limit: int = -1) -> list[Part]:
        """The parts on a side of a record, in their order."""
        rows = self._sql(
            "SELECT n, name, body FROM parts WHERE record = ? AND side = ? AND n > ? "
            "ORDER BY n LIMIT ?",
            (id, side, after, limit),
        )
        return [Part(*row) for row in rows]

    def part(self, id: str, side: str, n: int) -> Part | None:
        """One part of a record."""
        row = self._sql(
            "SELECT n, name, body FROM parts WHERE record = ? AND side = ? AND n = ?",
            (id, side, n),
        ).fetchone()
        return None if row is None else Part(*row)

    def numbers_by_name(self, id: str, side: str) -> list[int]:
        """The numbers of the parts on a side, in the order of their names."""
        rows = self._sql(
            "SELECT n FROM parts WHERE record = ? AND side = ? ORDER BY name, n", (id, side)
        )
        return [n for (n,) in rows]

    def next_number(self, id: str, side: str) -> int:
        """The number that the next part of a side has."""
        (n,) = self._sql(
            "SELECT coalesce(max(n), -1) + 1 FROM parts WHERE record = ? AND side = ?", (id, side)
        ).fetchone()
        return int(n)

    def named(self, name: str, owner: bytes) -> Part | None:
        """Find a part by its name in the records of an owner."""
        row = self._sql(
            "SELECT n, name, parts.body FROM parts JOIN records ON records.id = record "
            "WHERE name = ? AND owner = ? LIMIT 1",
            (name, owner),
        ).fetchone()
        return None if row is None else Part(*row)

    def remove(self, id: str, side: str, n: int | None = None) -> int:
        """Delete a part of a record, or a whole side; returns how many there were."""
        one, values = ("", ()) if n is None else (" AND n = ?", (n,))
        return self._sql(
            f"DELETE FROM parts WHERE record = ? AND side = ?{one}", (id, side, *values)
        ).rowcount

    def size_of(self, id: str, side: str) -> int:
        """The bytes of the parts on a side of a record."""
        (n,) = self._sql(
            "SELECT coalesce(sum(length(body)), 0) FROM parts WHERE record = ? AND side = ?",
            (id, side),
        ).fetchone()
        return int(n)

    def move(self, id: str, side: str, to: str, to_side: str) -> None:
        """Move the parts on a side of a record to another one."""
        self._sql(
            "INSERT INTO parts SELECT ?, ?, n, name, body FROM parts WHERE record = ? AND side = ?",
            (to, to_side, id, side),
        )
        self.remove(id, side)

    # -- room

    def make_room(self, n_bytes: int, for_record: str = "") -> None:
        """Delete what was not used for longest, until `n_bytes` more fit.

        Raises:
            StoreFullError: all else is work that is not over, or the record itself.
        """
        excess = self._n_bytes() + n_bytes - self._max_bytes
        while excess > 0:
            found = next(self._evictable(for_record), None) if n_bytes <= self._max_bytes else None
            if found is None:
                raise StoreFullError(f"The store is full: --store-size is {self._max_bytes} bytes.")
            self.delete(found[0])
            excess -= found[1]

    def _n_bytes(self) -> int:
        (n,) = self._sql("SELECT coalesce(sum(size), 0) FROM sizes").fetchone()
        return int(n)

    def _evictable(self, besides: str) -> Iterator[tuple[str, int]]:
        for (owner,) in self._sql("SELECT owner FROM sizes ORDER BY size DESC").fetchall():
            yield from self._sql(
                "SELECT id, size FROM records WHERE is_open = 0 AND owner = ? AND id != ? "
                "ORDER BY used LIMIT 1",
                (owner, besides),
            )


_SELECT = "SELECT id, kind, owner, created, is_open, body FROM records"


def _record(row: tuple[Any, ...]) -> Record:
    id_, kind, owner, created, is_open, body = row
    return Record(id_, kind, owner, created, bool(is_open), _decoded(body))
