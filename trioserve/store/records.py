"""`Records`: what a store keeps, as functions that run in its thread, in a transaction.

A record has an owner, a body in JSON, and numbered parts on several sides, such as the items of the
input and of the output of a response. Ids are random, and a record is found by its owner only.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import attrs

from trioserve.errors import (
    NotFoundError,
    RecordDamagedError,
    RecordTooLargeError,
    StoreError,
    StoreFullError,
)
from trioserve.log import get_logger
from trioserve.store.database import DRAFT
from trioserve.store.usage import expire_usage

_T = TypeVar("_T")
_log = get_logger("trioserve.store")

#: Seconds before the time of the last use is written again.
_SOON = 3600.0

#: Bytes and rows that are read in one transaction, unless one row alone has more bytes.
_PIECE, _ROWS = 2**20, 1000

#: Bytes of the body of a record, and of parts that are added together; see `check_sizes`.
MAX_BODY, MAX_WRITE = 2**22, 2**25


@attrs.frozen
class Record:
    """A record. `created` is a Unix time, and `is_open` says that its work is not over.

    Its body is decoded when it is asked for: if it may be long, not in the thread of the store.
    """

    id: str
    kind: str
    owner: bytes
    created: float
    is_open: bool = attrs.field(converter=bool)
    data: bytes = attrs.field(repr=False)

    @cached_property
    def body(self) -> dict[str, Any]:
        """The JSON of the body. Raises StoreError: it is damaged."""
        if not isinstance(body := decode(self.data), dict):
            raise damaged()
        return body


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
        """The JSON of the body. Raises StoreError: it is damaged."""
        return decode(self.body)


@attrs.frozen
class Ref:
    """The place of a part, and its size in bytes."""

    record: str
    side: str
    n: int
    size: int


def pieces_of(each: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Divide refs, or parts, into what one transaction reads, or writes."""
    some: list[_T] = []
    n_bytes = 0
    for one in each:
        if some and (n_bytes + size(one) > _PIECE or len(some) == _ROWS):
            yield some
            some, n_bytes = [], 0
        some.append(one)
        n_bytes += size(one)
    if some:
        yield some


def new_id(prefix: str, mark: str = "_") -> str:
    """Make an id that cannot be guessed."""
    return f"{prefix}{mark}{secrets.token_hex(16)}"


def encode(value: Any) -> bytes:
    """Write JSON as the store has it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Read JSON as the store has it. Raises StoreError: it is damaged."""
    try:
        return json.loads(data)
    except (ValueError, TypeError, RecursionError):
        raise damaged() from None


def _body(value: Any) -> bytes:
    data = encode(value)
    check_sizes(len(data), 0)
    return data


def check_sizes(n_body: int, n_parts: int) -> None:
    """Check the bytes of a body, and of parts that are added together.

    Raises:
        RecordTooLargeError: they are written at once, while others wait, and are too many for that.
    """
    for what, n_bytes, most in (("fields", n_body, MAX_BODY), ("items", n_parts, MAX_WRITE)):
        if n_bytes > most:
            raise RecordTooLargeError(
                f"This cannot be stored: its {what} take {n_bytes} bytes, and {most} is the most."
            )


def damaged() -> StoreError:
    """Make, and log, the error about content that is damaged: SQLite has no checksums for it."""
    error = RecordDamagedError("The content of a record in the store is damaged.")
    _log.error("the store failed", problem=error.message)
    return error


class Records:
    """The records of a database.

    Args:
        connection: to the database. Transactions are the caller's.
        max_bytes: of all records. Beyond that, those of the owner with most are deleted, the ones
            that were not used for longest first.
        seconds: after which a record that was not used is deleted.
        shared: whether to limit the open records of each owner; see `check_share`.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        max_bytes: int,
        seconds: float,
        *,
        shared: bool = False,
    ) -> None:
        self._sql = connection.execute
        self._many = connection.executemany
        #: For what is no record, such as usage.
        self.connection = connection
        self._max_bytes, self._seconds, self._shared = max_bytes, seconds, shared
        #: Called with the bytes of bodies before they are read. May raise.
        self.count: Callable[[int], object] | None = None

    def _counted(self, columns: str, source: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Read rows with their bodies, which are counted before."""
        if self.count is not None:
            sizes = f"SELECT length(body) AS size FROM {source}"
            self.count(self._number(f"SELECT coalesce(sum(size), 0) FROM ({sizes})", values))
        return self._sql(f"SELECT {columns} FROM {source}", values).fetchall()

    def _number(self, query: str, values: Sequence[Any] = ()) -> int:
        (n,) = self._sql(query, values).fetchone()
        return int(n)

    # -- records

    def add(self, id: str, kind: str, owner: bytes, body: Any, *, is_open: int = False) -> None:
        """Add a record. Raises StoreFullError, RecordTooLargeError."""
        data, now = _body(body), time.time()
        self.make_room(len(data))
        self._sql(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id, kind, owner, now, now, is_open, data),
        )

    def find(self, id: str, kind: str, owner: bytes) -> Record | None:
        """Find a record of an owner, and note that it is in use."""
        rows = self._counted(_COLUMNS, _FOUND, (id, kind, owner))
        if not rows:
            return None
        self._note_use(id)
        return Record(*rows[0])

    def fields(self, id: str, kind: str, owner: bytes, *names: str) -> tuple[Any, ...] | None:
        """Find some fields of a record, which are no objects, and note that it is in use."""
        fields = ", ".join(["json_extract(CAST(body AS TEXT), ?)"] * len(names)) or "id"
        found: tuple[Any, ...] | None = self._sql(
            f"SELECT {fields} FROM {_FOUND}", (*(f"$.{name}" for name in names), id, kind, owner)
        ).fetchone()
        if found is not None:
            self._note_use(id)
        return found

    def _note_use(self, id: str) -> None:
        now = time.time()
        self._sql("UPDATE records SET used = ? WHERE id = ? AND used < ?", (now, id, now - _SOON))

    def listed(
        self,
        kind: str,
        owner: bytes,
        *,
        limit: int,
        after: Record | None = None,
        newest: bool = True,
    ) -> list[Record]:
        """List records of an owner, from the one after a record on."""
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        where = f"kind = ? AND owner = ? AND is_open != {DRAFT}"
        values = list[Any]((kind, owner))
        if after is not None:
            where += f" AND (created, id) {sign} (?, ?)"
            values += [after.created, after.id]
        source = f"records WHERE {where} ORDER BY created {order}, id {order} LIMIT ?"
        rows = self._counted(_COLUMNS, source, (*values, limit))
        return [Record(*row) for row in rows]

    def open_ones(self, kind: str) -> list[Record]:
        """The records of all owners whose work is not over, the oldest first."""
        source = "records WHERE is_open = 1 AND kind = ? ORDER BY created, id"
        return [Record(*row) for row in self._counted(_COLUMNS, source, (kind,))]

    def change(self, id: str, body: Any, *, is_open: bool = False, kind: str | None = None) -> None:
        """Replace the body of a record, if it exists, and its kind, if one is given.

        Raises:
            RecordTooLargeError: the body is too large.
        """
        data = _body(body)
        self._sql(
            "UPDATE records SET body = ?, is_open = ?, used = ?, kind = coalesce(?, kind) "
            "WHERE id = ?",
            (data, is_open, time.time(), kind, id),
        )

    def mark(self, id: str, is_open: int) -> None:
        """Set whether the work of a record is not over. One that is a `DRAFT` is not found."""
        self._sql("UPDATE records SET is_open = ? WHERE id = ?", (is_open, id))

    def delete(self, id: str) -> None:
        """Delete a record and its parts, if it exists."""
        self._sql("DELETE FROM records WHERE id = ?", (id,))

    def delete_some(self, id: str) -> bool:
        """Delete a record; of a large one, some of its parts. Returns whether there are more."""
        parts = "SELECT rowid, length(body) FROM parts WHERE record = ? LIMIT ?"
        found = self._sql(parts, (id, _ROWS + 1)).fetchall()
        some = next(pieces_of(found, lambda row: int(row[1])), [])
        if len(some) == len(found):
            self.delete(id)
            return False
        self.mark(id, DRAFT)
        self._many("DELETE FROM parts WHERE rowid = ?", [(row,) for row, _ in some])
        return True

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
        """Add parts to a record. Raises StoreFullError, RecordTooLargeError."""
        parts = list(parts)
        n_bytes = sum(len(each.body) for each in parts)
        check_sizes(0, n_bytes)
        self.make_room(n_bytes, id)
        self._many(
            "INSERT INTO parts VALUES (?, ?, ?, ?, ?)",
            [(id, side, each.n, each.name, each.body) for each in parts],
        )

    def part(self, id: str, side: str, n: int) -> Part | None:
        """One part of a record."""
        source = "parts WHERE record = ? AND side = ? AND n = ?"
        rows = self._counted(_PART, source, (id, side, n))
        return Part(*rows[0]) if rows else None

    def refs(
        self, id: str, side: str, *, after: int | None = None, limit: int = -1, newest: bool = False
    ) -> list[Ref]:
        """Find the parts on a side, from the one after a number on. Reads no bodies."""
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        where, values = "record = ? AND side = ?", [id, side]
        if after is not None:
            where += f" AND n {sign} {after:d}"
        rows = self._sql(
            f"SELECT record, side, n, length(body) FROM parts WHERE {where} "
            f"ORDER BY n {order} LIMIT {limit:d}",
            values,
        )
        return [Ref(*row) for row in rows]

    def read(self, refs: Sequence[Ref]) -> list[Part]:
        """Read parts. Raises NotFoundError: one of them was deleted since the refs were made."""
        if self.count is not None:
            self.count(sum(ref.size for ref in refs))
        # The size tells a part from a later one with the same number.
        one = f"SELECT {_PART} FROM parts WHERE (record, side, n, length(body)) = (?, ?, ?, ?)"
        rows = [self._sql(one, attrs.astuple(ref)).fetchone() for ref in refs]
        if None in rows:
            raise NotFoundError("What was to be read has been deleted meanwhile.")
        return [Part(*row) for row in rows]

    def some(self, id: str, side: str, *, after: int = -1) -> list[Part]:
        """The parts on a side after a number, as many as one transaction reads."""
        refs = self.refs(id, side, after=after, limit=_ROWS)
        return self.read(next(pieces_of(refs, lambda ref: ref.size), []))

    def places(self, name: str) -> list[tuple[str, str, int]]:
        """The record, the side and the number of each part with a name, of all owners."""
        return self._sql("SELECT record, side, n FROM parts WHERE name = ?", (name,)).fetchall()

    def numbers_by_name(self, id: str, side: str) -> list[int]:
        """The numbers of the parts on a side, in the order of their names."""
        rows = self._sql(
            "SELECT n FROM parts WHERE record = ? AND side = ? ORDER BY name, n", (id, side)
        )
        return [n for (n,) in rows]

    def next_number(self, id: str, side: str) -> int:
        """The number that the next part of a side has."""
        return self._number(
            "SELECT coalesce(max(n), -1) + 1 FROM parts WHERE record = ? AND side = ?", (id, side)
        )

    def named(self, name: str, owner: bytes, *kinds: str) -> Ref | None:
        """Find a part of an owner by its name, in records of some kinds, which are then in use."""
        found = self._sql(
            "SELECT record, side, n, length(parts.body) "
            "FROM parts CROSS JOIN records ON id = record "
            f"WHERE name = ? AND owner = ? AND kind IN ({', '.join('?' * len(kinds))}) "
            f"AND is_open != {DRAFT} LIMIT 1",
            (name, owner, *kinds),
        ).fetchone()
        if found is None:
            return None
        ref = Ref(*found)
        self._note_use(ref.record)
        return ref

    def remove(self, id: str, side: str, n: int) -> bool:
        """Delete a part of a record; returns whether it was there."""
        one = "DELETE FROM parts WHERE record = ? AND side = ? AND n = ?"
        return self._sql(one, (id, side, n)).rowcount > 0

    def size_of(self, id: str, side: str) -> int:
        """The bytes of the parts on a side of a record."""
        return self._number(
            "SELECT coalesce(sum(length(body)), 0) FROM parts WHERE record = ? AND side = ?",
            (id, side),
        )

    # -- room

    def make_room(self, n_bytes: int, for_record: str = "") -> None:
        """Delete what was not used for longest, until `n_bytes` more fit.

        Raises:
            StoreFullError: all else is work that is not over, or the record itself.
        """
        held = self._number("SELECT coalesce(sum(size), 0) FROM sizes")
        excess = held + n_bytes - self._max_bytes
        while excess > 0:
            found = next(self._evictable(for_record), None) if n_bytes <= self._max_bytes else None
            if found is None:
                raise StoreFullError(f"The store is full: --store-size is {self._max_bytes} bytes.")
            self.delete(found[0])
            excess -= found[1]

    def check_share(self, owner: bytes, n_bytes: int, *, has_begun: bool = False) -> None:
        """Check that the open records of an owner may take `n_bytes` more: they cannot be deleted.

        With several owners, each may take the limit divided by one more than the number of owners
        with open records. What has begun may grow to three quarters of the limit, so that an owner
        does not have to wait for others.

        Raises:
            StoreFullError: they may not.
        """
        if not self._shared:
            return
        held = dict(
            self._sql(
                "SELECT loads.owner, sum(loads.size) FROM records JOIN loads ON record = id "
                "WHERE is_open = 1 GROUP BY loads.owner"
            )
        )
        n_owners = len(held.keys() | {owner})
        most = self._max_bytes * 3 // 4 if has_begun else self._max_bytes // (n_owners + 1)
        if held.get(owner, 0) + n_bytes > most:
            raise StoreFullError(
                f"What runs of this API key has {held.get(owner, 0)} bytes in the store, and may "
                f"have {most}, to leave room for other keys: --store-size is {self._max_bytes}."
            )

    def _evictable(self, besides: str) -> Iterator[tuple[str, int]]:
        for (owner,) in self._sql("SELECT owner FROM sizes ORDER BY size DESC").fetchall():
            yield from self._sql(
                "SELECT id, loads.size FROM records JOIN loads ON record = id "
                "WHERE is_open = 0 AND records.owner = ? AND id != ? ORDER BY used LIMIT 1",
                (owner, besides),
            )


_FOUND = f"records WHERE id = ? AND kind = ? AND owner = ? AND is_open != {DRAFT}"
_COLUMNS = "id, kind, owner, created, is_open, body"
_PART = "n, name, body"
