"""The database of a store: opened, migrated, checked, compacted and copied. All of it blocks."""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from trioserve.errors import StoreError, StoreInUseError

if sys.platform != "win32":
    from fcntl import LOCK_EX, LOCK_NB, flock

#: In place of a path: nothing is written to disk.
MEMORY = ":memory:"

#: In the header of the file, so that no other program's database is taken for a store.
_APPLICATION_ID = 0x7472696F

#: In place of `is_open`: the record is being written, and is not found. The next start deletes it.
DRAFT = 2

#: Seconds to wait for a program that holds SQLite's own lock, such as a backup.
_PATIENCE = 5.0

#: Bytes of the write-ahead log that stay on disk.
_MAX_LOG = 16 * 2**20

#: The additions of each version of the schema. Never change an entry that was released.
_MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
    CREATE TABLE records (
        id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        owner BLOB NOT NULL,
        created REAL NOT NULL,
        used REAL NOT NULL,
        is_open INTEGER NOT NULL,  -- work that is not over, and must not be evicted
        body BLOB NOT NULL
    );
    CREATE INDEX records_by_owner ON records (owner, kind, created);
    CREATE INDEX records_by_use ON records (is_open, owner, used);
    CREATE INDEX records_by_age ON records (is_open, used);
    CREATE TABLE parts (
        record TEXT NOT NULL REFERENCES records (id) ON DELETE CASCADE,
        side TEXT NOT NULL,
        n INTEGER NOT NULL,
        name TEXT NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (record, side, n)
    );
    CREATE INDEX parts_by_name ON parts (name);
    -- The sizes of records. A change of a row of `records` would write its body, too.
    CREATE TABLE loads (
        record TEXT PRIMARY KEY,
        owner BLOB NOT NULL,
        size INTEGER NOT NULL  -- bytes, with those of its parts
    ) WITHOUT ROWID;
    CREATE TABLE sizes (owner BLOB PRIMARY KEY, size INTEGER NOT NULL);

    CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
        INSERT INTO loads VALUES (new.id, new.owner, length(new.body));
    END;
    CREATE TRIGGER record_changed AFTER UPDATE OF body ON records BEGIN
        UPDATE loads SET size = size + length(new.body) - length(old.body) WHERE record = new.id;
    END;
    CREATE TRIGGER record_deleted AFTER DELETE ON records BEGIN
        DELETE FROM loads WHERE record = old.id;
    END;
    CREATE TRIGGER part_added AFTER INSERT ON parts BEGIN
        UPDATE loads SET size = size + length(new.body) WHERE record = new.record;
    END;
    CREATE TRIGGER part_deleted AFTER DELETE ON parts BEGIN
        UPDATE loads SET size = size - length(old.body) WHERE record = old.record;
    END;
    CREATE TRIGGER load_added AFTER INSERT ON loads BEGIN
        INSERT INTO sizes VALUES (new.owner, new.size)
        ON CONFLICT (owner) DO UPDATE SET size = size + new.size;
    END;
    CREATE TRIGGER load_changed AFTER UPDATE OF size ON loads BEGIN
        UPDATE sizes SET size = size + new.size - old.size WHERE owner = new.owner;
    END;
    CREATE TRIGGER load_deleted AFTER DELETE ON loads BEGIN
        UPDATE sizes SET size = size - old.size WHERE owner = old.owner;
        DELETE FROM sizes WHERE owner = old.owner AND size <= 0;
    END;

    CREATE TABLE usage (
        day TEXT NOT NULL,
        key TEXT NOT NULL,  -- the name of an API key
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        input_tokens INTEGER NOT NULL,
        cached_input_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (day, key, model)
    ) WITHOUT ROWID;
    """,
)


class Database:
    """An open database. One thread at a time may use it.

    Args:
        path: the file, which is created if it does not exist, or `MEMORY`.

    Raises:
        StoreInUseError: another server has the file.
        StoreError: the file cannot be used; the message says why.
    """

    def __init__(self, path: str = MEMORY) -> None:
        self.path = path
        self._lock = None if path == MEMORY else _locked(path)
        try:
            with translated(path):
                self.connection = _connect(path, "rwc")
                try:
                    _prepare(self.connection, path)
                except BaseException:
                    self.connection.close()
                    raise
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        """Close it. What was committed stays, whatever happens here."""
        with suppress(sqlite3.Error):
            self.connection.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def salt(self) -> bytes:
        """The salt of the digests of API keys."""
        (value,) = self.connection.execute("SELECT value FROM meta WHERE name = 'salt'").fetchone()
        assert isinstance(value, bytes)
        return value

    def compact(self) -> None:
        """Give back the space of what was deleted. Raises StoreError."""
        with translated(self.path):
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _locked(path: str) -> IO[bytes]:
    """Lock a file beside the database: closing the database itself would drop SQLite's locks.

    Only its owner can open it, so no other user can hold the lock.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        lock = os.fdopen(os.open(f"{path}.lock", flags, 0o600), "r+b")
    except OSError as error:
        raise StoreError(f"The store {path} cannot be used: {error.strerror or error}.") from None
    if sys.platform != "win32":
        try:
            _keep_from_others(lock.fileno(), path)
            flock(lock, LOCK_EX | LOCK_NB)
        except OSError:
            lock.close()
            raise StoreInUseError(f"The store {path} is in use by another server.") from None
        except BaseException:
            lock.close()
            raise
    return lock


def _keep_from_others(lock: int, path: str) -> None:
    """Raises StoreError: the file is another user's, who could hold its lock."""
    found = os.fstat(lock)
    owners = {os.geteuid()}
    with suppress(OSError):
        owners.add(os.stat(path).st_uid)  # root may maintain the store of another user
    if found.st_uid not in owners:
        raise StoreError(
            f"The store {path} cannot be used: {path}.lock belongs to another user. Delete it, and "
            "use a folder in which others cannot make files."
        )
    if found.st_mode & 0o077:
        os.fchmod(lock, 0o600)


def _connect(path: str, mode: str) -> sqlite3.Connection:
    if path == MEMORY:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    if mode == "rwc" and not Path(path).exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it holds what people wrote
    return sqlite3.connect(
        f"{Path(path).absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=_PATIENCE,
        isolation_level=None,
        check_same_thread=False,
    )


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    """Configure a connection that writes, and bring the schema up to date."""
    version = _version(connection, path)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    if path != MEMORY:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG}")
    for number, script in enumerate(_MIGRATIONS[version:], version + 1):
        # In one transaction, with the number: a process that dies here leaves the version before.
        connection.executescript(
            f"BEGIN IMMEDIATE; {script} PRAGMA application_id = {_APPLICATION_ID};"
            f"PRAGMA user_version = {number}; COMMIT"
        )
    connection.execute("BEGIN IMMEDIATE")  # now, rather than with the first request, if it fails
    connection.execute("DELETE FROM records WHERE is_open = ?", (DRAFT,))
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('salt', ?)", (secrets.token_bytes(32),))
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection, path: str) -> int:
    """The version of the schema; 0 for an empty file. Raises StoreError for other databases."""
    version: int = _pragma(connection, "user_version")
    (n_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if _pragma(connection, "application_id") != _APPLICATION_ID and n_tables:
        raise StoreError(f"{path} is a database of another program.")
    if version > len(_MIGRATIONS):
        raise StoreError(
            f"The store {path} was written by a newer trioserve: its schema has version "
            f"{version}, and this one knows versions up to {len(_MIGRATIONS)}."
        )
    return version


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


# -- errors

_CAUSES = {
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_BUSY: "another program has locked it",
    sqlite3.SQLITE_LOCKED: "another program has locked it",
    sqlite3.SQLITE_READONLY: "it, or its folder, is read-only",
    sqlite3.SQLITE_PERM: "its permissions do not allow it",
    sqlite3.SQLITE_CANTOPEN: "it, or its folder, cannot be opened",
    sqlite3.SQLITE_CORRUPT: "it is damaged; trioserve store check has details",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database, or is damaged",
    sqlite3.SQLITE_IOERR: "its disk reports an error",
}


def error_of(error: Exception, path: str) -> StoreError:
    """Translate an error of SQLite or of the system."""
    if isinstance(error, MemoryError):
        return StoreError(f"The store {path} cannot be used: there is no memory for it.")
    code = getattr(error, "sqlite_errorcode", None)
    cause = None if code is None else _CAUSES.get(code & 0xFF)
    if cause is None:
        cause = getattr(error, "strerror", None) or str(error)
    return StoreError(f"The store {path} cannot be used: {cause}.")


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Translate errors of SQLite and of the system in a block to StoreError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise error_of(error, path) from error


def owner_of(key: str, salt: bytes) -> bytes:
    """The owner of what a client with this API key stores. The key cannot be found from it."""
    return hashlib.blake2b(key.encode(), key=salt, digest_size=16).digest()


# -- maintenance, without a server or beside one


@contextmanager
def existing(path: str) -> Iterator[Database]:
    """Open a store that no server uses, for a block. Raises StoreError."""
    with reading(path):
        pass  # it is one
    with closing(Database(path)) as database, translated(path):
        yield database


@contextmanager
def reading(path: str) -> Iterator[sqlite3.Connection]:
    """Open a store to read it for a block, also while a server uses it. Raises StoreError."""
    if not Path(path).is_file():
        raise StoreError(f"There is no store {path}.")
    with translated(path), closing(_connect(path, "ro")) as connection:
        if not _version(connection, path):
            raise StoreError(f"{path} is not a store.")
        yield connection


def problems(path: str) -> list[str]:
    """Check a store; returns what is wrong with it. Raises StoreError: it cannot be read."""
    with reading(path) as connection:
        try:
            return list(_problems(connection))
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
            return [str(error)]


def _problems(connection: sqlite3.Connection) -> Iterator[str]:
    found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check")]
    yield from found if found != ["ok"] else ()
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} belongs to nothing in {parent}"
    wrong = connection.execute(
        "SELECT owner FROM loads GROUP BY owner "
        "HAVING sum(size) != (SELECT size FROM sizes WHERE sizes.owner = loads.owner)"
    )
    yield from ("the bytes of an owner are not counted correctly" for _ in wrong)


def summary(path: str) -> list[tuple[str, int, int]]:
    """The number and the bytes of records, by kind. Raises StoreError."""
    with reading(path) as connection:
        return list(
            connection.execute(
                "SELECT kind, count(*), sum(size) "
                "FROM records JOIN loads ON record = id GROUP BY kind"
            )
        )


def export(path: str, target: str, on_progress: Callable[[float], None]) -> None:
    """Copy a store, consistently, also while a server writes to it.

    The target has the whole copy or does not exist.

    Raises:
        StoreError: the store cannot be read, or the target cannot be written.
    """
    if Path(target).exists():
        raise StoreError(f"{target} exists.")
    part = f"{target}.part"

    def progress(_status: int, left: int, total: int) -> None:
        on_progress(1 - left / max(total, 1))

    try:
        with reading(path) as source, translated(target):
            Path(part).unlink(missing_ok=True)
            os.close(os.open(part, os.O_CREAT | os.O_RDWR, 0o600))
            with closing(sqlite3.connect(part)) as copy:
                # In a transaction: a copy outside of one begins again after each write of a server.
                source.execute("BEGIN")
                _version(source, path)
                source.backup(copy, pages=1024, progress=progress)
                source.execute("COMMIT")
                copy.execute("PRAGMA journal_mode = DELETE")  # the copy is one file
            os.replace(part, target)
    finally:
        Path(part).unlink(missing_ok=True)
