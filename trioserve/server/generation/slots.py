"""Saves the KV cache of slots to files, and restores it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

import attrs
import trio

from trioserve.config import Config
from trioserve.engine import Engine
from trioserve.errors import (
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
    PermissionDeniedError,
    TrioServeError,
)
from trioserve.server.adapters import AdapterScales
from trioserve.server.dispatch import Dispatcher

_T = TypeVar("_T")

#: Names that some file system, shell or encoding would change or reject.
_FORBIDDEN = re.compile(
    r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u2215\u2216\ud800-\udfff\ufeff\uff0e\ufffd]|\.\.|^ |[ .]$'
)
_LONGEST_NAME = 255  # bytes, in most file systems


def check_slot_files(config: Config) -> Path:
    """Return the folder of slot files. Raises NotSupportedError without `--slot-save-path`."""
    if config.slot_save_path is None:
        raise NotSupportedError(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    return Path(config.slot_save_path)


@attrs.frozen
class Moved:
    """A sequence that was written or read: tokens, bytes, and the time in milliseconds."""

    n_tokens: int
    n_bytes: int
    ms: float


@attrs.define(eq=False, slots=False)
class SlotFiles:
    """Saves, restores and erases the cached sequence of an idle slot. Used on the event loop.

    A call waits until the slot is idle. The engine copies the KV cache between two steps; a worker
    thread reads and writes files. Cancelling a call while it waits does nothing; after that, the
    operation runs to its end.
    """

    _engine: Engine  # has the slots
    _dispatcher: Dispatcher  # calls functions on the inference thread
    _adapters: AdapterScales  # the LoRA adapters to assume for files that do not name any
    _config: Config  # has the folder of the files

    def __attrs_post_init__(self) -> None:
        self._one = trio.Lock()  # a state can be as large as the KV cache: one at a time

    async def save(self, slot_id: int, filename: str, owner: str) -> Moved:
        """Save the sequence that a slot ran last, or the part that is still in the cache.

        Raises:
            PermissionDeniedError: the sequence or an existing file belongs to another owner.
            InvalidRequestError: the slot does not exist, or the file name is invalid.
            NotSupportedError: the server was started without a directory for files.
            TrioServeError: the file cannot be written.
        """
        path = self._path(filename)
        await self._at(slot_id, lambda _: None)  # until it is idle, so that others do not wait
        async with self._one:
            began = monotonic()
            saved = await self._at(slot_id, partial(self._engine.save_slot, owner=owner))
            write = partial(self._engine.write_state, path, saved)
            try:
                n_bytes = await trio.to_thread.run_sync(write)
            except OSError as error:
                raise TrioServeError("Unable to save slot.") from error
        return Moved(len(saved.keys), n_bytes, (monotonic() - began) * 1e3)

    async def restore(self, slot_id: int, filename: str, owner: str) -> Moved:
        """Load a file into the cache. Later prompts with the same prefix use it, in any slot.

        Raises:
            PermissionDeniedError: another owner, or an unknown one, saved the file.
            InvalidRequestError: the slot or the file does not exist, the file is of another model,
                or the KV cache has no room.
            NotSupportedError: the server was started without a directory for files.
        """
        path = self._path(filename)
        await self._at(slot_id, lambda _: None)  # until it is idle, so that others do not wait
        async with self._one:
            began = monotonic()
            read = partial(self._engine.read_state, path, self._adapters.current)
            try:
                saved, n_bytes = await trio.to_thread.run_sync(read)
                if saved.root.owner != owner:
                    raise PermissionDeniedError("The file was not saved with this API key.")
                await self._at(slot_id, partial(self._engine.restore_slot, saved=saved))
            except OSError as error:
                raise _refusal(f"the file cannot be read: {error.strerror}.") from error
            except (InvalidRequestError, KVCacheFullError) as error:
                if error.param is not None:
                    raise  # the message names the file
                raise _refusal(error.message) from error
        return Moved(len(saved.keys), n_bytes, (monotonic() - began) * 1e3)

    async def erase(self, slot_id: int, owner: str) -> int:
        """Erase the sequence that a slot ran last; returns its number of tokens.

        Raises:
            PermissionDeniedError: the sequence belongs to another owner.
            InvalidRequestError: the slot does not exist.
            NotSupportedError: the server was started without a directory for files.
        """
        check_slot_files(self._config)
        return await self._at(slot_id, partial(self._engine.erase_slot, owner=owner))

    async def _at(self, slot_id: int, function: Callable[[int], _T]) -> _T:
        return await self._dispatcher.call(partial(function, slot_id), slot_id=slot_id)

    def _path(self, filename: str) -> Path:
        directory = check_slot_files(self._config)
        is_odd = _FORBIDDEN.search(filename) is not None
        if not filename or is_odd or len(filename.encode()) > _LONGEST_NAME:
            raise InvalidRequestError("Invalid filename", param="filename")
        return directory / filename


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Unable to restore slot: {why}", param="filename")
