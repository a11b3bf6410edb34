"""`Keys`: the API keys of a server, of ``--api-key`` and of the file of ``--api-keys``."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator

import trio
from trio_util import AsyncValue

from trioserve.concurrency import repeat, run_in_worker
from trioserve.config import Config
from trioserve.config.keys import Key, digest_of, read_keys
from trioserve.errors import AuthenticationError, ConfigError
from trioserve.log import get_logger

_log = get_logger("trioserve.keys")

#: Seconds between two looks at the file.
_INTERVAL = 1.0


class Keys:
    """The API keys of a server.

    Those of ``--api-key`` may do everything, and are called ``key-1``, ``key-2`` and so on. Those
    of the file are there once `load` has read it; until then, they are refused.
    """

    def __init__(self, config: Config) -> None:
        #: True if clients must show a key.
        self.needed = config.has_api_keys
        #: The first key of ``--api-key``, for the server's own requests; empty without one.
        self.first = next(iter(config.api_keys), "")
        #: The keys that are valid now, of those that clients have shown and of ``--api-key``.
        self.shown = AsyncValue(frozenset(config.api_keys))
        self._ever_shown = set(config.api_keys)
        self._path = config.keys_file
        self._own = tuple(_keys_of_flag(config))
        self._secret = secrets.token_bytes(32)
        self._found: dict[bytes, Key] = {}
        self._seen: tuple[int, int, int] | None = None  # the state of the file
        self._refreshing = trio.CapacityLimiter(1)
        self._take(())

    @property
    def number(self) -> int:
        """The number of keys."""
        return len(self._found)

    def find(self, shown: str) -> Key | None:
        """Find the key that a client shows; None if it is not valid.

        Its time reveals nothing about the valid keys: they are found by a hash that has a secret.
        """
        return self._found.get(self._tag(digest_of(shown)))

    def need(self, shown: str) -> Key:
        """Find the key that a client shows. Raises AuthenticationError if it is not valid."""
        if (found := self.find(shown)) is None:
            raise AuthenticationError("Invalid API Key")
        return found

    def _tag(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()

    # -- the file

    def load(self) -> None:
        """Read the file, if there is one. Blocks.

        Raises:
            ConfigError: the file cannot be used; names the line.
        """
        if self._path is not None:
            self._seen = _state_of(self._path)
            self._take(read_keys(self._path))

    async def open(self) -> None:
        """Read the file, if there is one. Raises ConfigError, as `load`."""
        if self._path is not None:
            await trio.to_thread.run_sync(self.load)

    def refresh(self) -> None:
        """Read the file again if it has changed. A damaged one is logged, and the keys stay as they
        are. Blocks.
        """
        if self._path is None or (state := _state_of(self._path)) == self._seen:
            return
        try:
            self._take(read_keys(self._path))
        except ConfigError as error:
            _log.error("the API keys stay as they are: the file is damaged", problem=error.message)
        else:
            _log.info("the API keys were read again", keys=self.number)
        self._seen = state  # not after an unforeseen error: the next look reads it again

    async def check(self, shown: str) -> Key:
        """Find the key that a client shows; look for it in a changed file if it is unknown.

        Raises:
            AuthenticationError: it is not valid.
        """
        if self.find(shown) is None and self._path is not None:
            await self._look()
        found = self.need(shown)
        if shown not in self.shown.value:
            self._ever_shown.add(shown)
            self.shown.value |= {shown}
        return found

    async def _look(self) -> None:
        before = self._found
        await run_in_worker(self.refresh, self._refreshing)
        if self._found is not before:
            valid = (key for key in self._ever_shown if self.find(key) is not None)
            self.shown.value = frozenset(valid)

    async def follow(self) -> None:
        """Keep the keys as they are in the file, until cancelled. Returns without a file."""
        if self._path is not None:
            await repeat(self._look_later)

    async def _look_later(self) -> None:
        await trio.sleep(_INTERVAL)
        await self._look()

    def _take(self, others: tuple[Key, ...]) -> None:
        """Use the keys of the file from now on. Raises ConfigError."""
        own = {key.digest: key for key in self._own}
        for key in others:
            if (same := own.get(key.digest)) is not None:
                raise ConfigError(f"{self._path}: the key {key.name!r} is {same.name} of --api-key")
        self._found = {self._tag(key.digest): key for key in (*own.values(), *others)}


def _keys_of_flag(config: Config) -> Iterator[Key]:
    for i, text in enumerate(config.api_keys):
        yield Key(
            name=f"key-{i + 1}",
            digest=digest_of(text),
            may_manage=True,
            priority=config.api_key_priority[i] if i < len(config.api_key_priority) else 0,
            weight=config.api_key_weights[i] if i < len(config.api_key_weights) else 1.0,
        )


def _state_of(path: str) -> tuple[int, int, int] | None:
    """The attributes of a file that change with it; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
