"""API keys: what each may do, and the file of ``--api-keys``, which has their hashes.

A key in the file is a table, whose name is that of the key::

    [alice]
    hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    models = ["qwen3-*"]
    tokens-per-minute = 20000

A fast hash is enough, because the keys that ``trioserve keys add`` makes are random: they have more
bits than anyone can try. What people choose themselves belongs into no file of hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
from attrs.converters import optional

from trioserve.config import readers
from trioserve.config.files import give_to_owner, replace_file, unwritable
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError, PermissionDeniedError

#: The highest priority that a key may have, and the largest number of tokens or requests.
MAX_PRIORITY = 100
_MAX_NUMBER = 2**53

#: The names that keys may have: they stand in logs and metrics, and need no quotes in TOML.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)

#: The names of the keys of ``--api-key``.
_NAME_OF_FLAG = re.compile(r"key-[0-9]+", re.ASCII)

_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})", re.ASCII)


def _digest(given: bytes | str) -> bytes:
    return bytes.fromhex(given.removeprefix("sha256:")) if isinstance(given, str) else given


@attrs.frozen(kw_only=True)
class Key:
    """An API key.

    Attributes:
        name: what logs and metrics call it.
        digest: its SHA-256.
        may_manage: whether it may change the server, or what other clients have.
        models: patterns of the names of the models that it may use, as of files; None: all.
        requests: the requests of a minute; None: as for all keys; 0: any number.
        tokens: the tokens of a minute, in the same way.
        daily_tokens: the tokens of prompts and outputs that it may use in a day; 0: any number.
        priority: the highest `priority` that it may ask for.
        weight: its turns in each round of the queue.
    """

    name: str
    digest: bytes = attrs.field(repr=False, converter=_digest)
    may_manage: bool = False
    models: tuple[str, ...] | None = attrs.field(default=None, converter=optional(tuple))
    requests: int | None = None
    tokens: int | None = None
    daily_tokens: int = 0
    priority: int = 0
    weight: float = attrs.field(default=1.0, converter=float)

    def may_use(self, *names: str) -> bool:
        patterns = self.models
        return patterns is None or any(fnmatchcase(n, each) for n in names for each in patterns)


def check_model(key: Key | None, *names: str) -> None:
    """Check that a key may use a model, which has these names. Without keys, it may.

    Raises:
        PermissionDeniedError: it may not.
    """
    if key is not None and not key.may_use(*names):
        raise PermissionDeniedError(f"This API key may not use the model {names[0]!r}.")


def digest_of(shown: str) -> bytes:
    """The digest of a key as a client shows it."""
    return hashlib.sha256(shown.encode("utf-8", "surrogateescape")).digest()


# -- the file


def read_keys(path: str) -> tuple[Key, ...]:
    """Read the file. Blocks. Raises ConfigError, which names the line of an invalid entry."""
    return parse_keys(readers.file(path), path)


def parse_keys(text: str, path: str) -> tuple[Key, ...]:
    """Read the text of a file, whose path is for errors. Raises ConfigError, as `read_keys`."""
    keys: dict[bytes, Key] = {}
    for name, table in readers.parse_toml(text, path).items():
        key = _read_key(name, table, _Place(path, text, name))
        if (other := keys.get(key.digest)) is not None:
            raise _Place(path, text, name).error("hash", f"is that of {other.name}, too")
        keys[key.digest] = key
    return tuple(keys.values())


@attrs.frozen
class _Place:
    """A table of a file, for errors."""

    path: str
    text: str
    name: str

    def error(self, field: str | None, problem: str) -> ConfigError:
        """An error of a field in the table, or else of the table."""
        start = self._find(rf"^[ \t]*\[?[ \t]*{_quoted(self.name)}[ \t]*[]=.]", 0)
        if field is not None and start is not None:
            start = self._find(rf"^[ \t]*{_quoted(field)}[ \t]*[=.]", start) or start
        line = "" if start is None else f":{self.text.count(chr(10), 0, start) + 1}"
        what = f"key {self.name!r}" if field is None else f"{field} of the key {self.name!r}"
        return ConfigError(f"{self.path}{line}: {what} {problem}")

    def _find(self, pattern: str, start: int) -> int | None:
        found = re.compile(pattern, re.MULTILINE).search(self.text, start)
        return None if found is None else found.start()


def _quoted(name: str) -> str:
    return rf"(?:\"{re.escape(name)}\"|'{re.escape(name)}'|{re.escape(name)})"


def _read_key(name: str, table: Any, place: _Place) -> Key:
    if not isinstance(table, Mapping):
        raise place.error(None, f"must be a table, such as [{name}]")
    check_name(name, place.error)
    values: dict[str, Any] = {}
    for field, value in table.items():
        if field not in _FIELDS:
            hint = did_you_mean(field, list(_FIELDS)) or f"; there are {', '.join(_FIELDS)}"
            raise place.error(field, f"is unknown{hint}")
        attribute, is_valid, expected = _FIELDS[field]
        if not is_valid(value):
            # The text in place of a hash may be the key itself.
            shown = "" if field == "hash" else f", not {value!r:.80}"
            raise place.error(field, f"must be {expected}{shown}")
        values[attribute] = value
    if "digest" not in values:
        raise place.error(None, "has no hash")
    key = Key(name=name, **values)
    if key.digest == digest_of(""):
        raise place.error("hash", "is that of an empty key")
    return key


def check_name(name: str, error: Callable[[str | None, str], ConfigError]) -> None:
    """Check what a key in the file is called; `error` makes the error that this raises."""
    if not _NAME.fullmatch(name):
        raise error(None, "must have a name of at most 64 letters, digits, - and _")
    if _NAME_OF_FLAG.fullmatch(name):
        raise error(None, "has the name of a key of --api-key: key- and a number")


def _between(low: float, high: float, *kinds: type) -> Callable[[Any], bool]:
    """Make a check for a number of some kinds, which refuses true and false."""
    return lambda value: type(value) in kinds and low <= value <= high


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, str) and one and one.isprintable() for one in value
    )


_NUMBER = _between(0, _MAX_NUMBER, int), f"an integer from 0 to {_MAX_NUMBER}; 0 = no limit"

#: The fields of a key in the file: the attribute of `Key`, whether a value is valid, and what is.
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool], str]] = {
    "hash": ("digest", lambda value: isinstance(value, str) and bool(_HASH.fullmatch(value)),
             "sha256: and 64 hexadecimal digits"),
    "manage": ("may_manage", lambda value: isinstance(value, bool), "true or false"),
    "models": ("models", _are_patterns, "a list of names of models"),
    "requests-per-minute": ("requests", *_NUMBER),
    "tokens-per-minute": ("tokens", *_NUMBER),
    "tokens-per-day": ("daily_tokens", *_NUMBER),
    "priority": ("priority", _between(0, MAX_PRIORITY, int), "an integer from 0 to 100"),
    "weight": ("weight", _between(0.001, 1000, int, float), "a number from 0.001 to 1000"),
}  # fmt: skip


# -- changes of the file

#: Seconds in which another command has to end that changes the file.
_PATIENCE = 30.0

#: Random bytes of a new key, and what stands before them, so that people know it when they see it.
_N_BYTES = 32
_PREFIX = "ts-"


def add_key(path: str, name: str, fields: Mapping[str, Any]) -> str:
    """Make a key, and append its table to the file, which need not exist. Blocks.

    `fields` are those of the table, but for the hash. The key that it returns is written nowhere.

    Raises:
        ConfigError: the name is taken, a value is invalid, or the file cannot be used.
    """
    check_name(name, lambda _, problem: ConfigError(f"the key {name!r} {problem}"))
    key = _PREFIX + secrets.token_urlsafe(_N_BYTES)
    values = {"hash": f"sha256:{digest_of(key).hex()}", **fields}
    toml = (f"{one} = {json.dumps(value, ensure_ascii=False)}" for one, value in values.items())
    with _locked(path):
        text = readers.file(path) if os.path.lexists(path) else ""
        if any(key.name == name for key in parse_keys(text, path)):
            raise ConfigError(f"{path} has a key {name!r} already")
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        text += gap + "\n".join([f"[{name}]", *toml, ""])
        parse_keys(text, path)
        replace_file(path, text)
    return key


def remove_key(path: str, name: str) -> None:
    """Remove the table of a key from the file; comments stay. Blocks.

    Raises:
        ConfigError: there is no such key, or the file cannot be used.
    """
    with _locked(path):
        replace_file(path, _without(name, readers.file(path), path))


def _without(name: str, text: str, path: str) -> str:
    """The text of the file without the table of a key. Raises ConfigError."""
    before = parse_keys(text, path)
    if all(key.name != name for key in before):
        raise ConfigError(f"{path} has no key {name!r}")
    lines = text.splitlines(keepends=True)
    header = re.compile(rf"[ \t]*\[[ \t]*{_quoted(name)}[ \t]*\]")
    start = next((i for i, line in enumerate(lines) if header.match(line)), len(lines))
    stop = end = start + 1
    while stop < len(lines) and not lines[stop].lstrip().startswith("["):
        stop += 1
        if not lines[stop - 1].lstrip().startswith("#") and lines[stop - 1].strip():
            end = stop  # what follows is a comment, perhaps on the next key
    left = "".join((*lines[:start], *lines[end:]))
    with suppress(ConfigError):
        if parse_keys(left, path) == tuple(key for key in before if key.name != name):
            return left
    problem = f"the key {name!r} is written in a way that only an editor can remove"
    raise ConfigError(f"{path}: {problem}")


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Have the file for one command alone during a block. Raises ConfigError."""
    from filelock import FileLock, Timeout  # slow to import, and a server does not need it

    target = Path(os.path.realpath(path))
    lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=_PATIENCE, mode=0o600)
    try:
        with lock:
            with suppress(FileNotFoundError, PermissionError):
                give_to_owner(target, lock.lock_file)
            yield
    except Timeout:
        raise ConfigError(f"{path} is locked by another command") from None
    except OSError as error:
        raise unwritable(path, error) from None
