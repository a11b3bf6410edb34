"""Removes the private folders of commands that could not be removed when the command ended."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from trioserve.concurrency import Bell, alongside, repeat, run_in_worker
from trioserve.errors import ToolRuntimeError
from trioserve.log import get_logger
from trioserve.tools.process import run
from trioserve.tools.supervisor import PREFIX, REMOVE, SYSTEM_PATH

_log = get_logger(__name__)

#: Seconds that a removal may take. The next start continues it.
_PATIENCE = 600.0


@asynccontextmanager
async def removing_folders() -> AsyncIterator[Callable[[], None]]:
    """Remove folders that no command uses, while a block runs: at its start, and when called.

    One is removed after the other, in a process that ends with the block. The first are those of
    servers that were killed.
    """
    bell = Bell()

    async def remove() -> None:
        found: list[Path] = []
        await run_in_worker(partial(_find, found))
        for folder in found:
            await _remove(folder)
        await bell.wait()

    async with alongside(partial(repeat, remove)):
        yield bell.ring


def _find(found: list[Path]) -> None:
    """Look for folders that belong to our user and that no supervisor has locked."""
    found += filter(_is_left, Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def _is_left(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.geteuid():
            return False
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is gone, or no folder
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


async def _remove(folder: Path) -> None:
    command = ["nice", "sh", "-c", REMOVE, "sh", str(folder)]
    try:
        output = await run(command, timeout=_PATIENCE, max_output=500, env={"PATH": SYSTEM_PATH})
    except ToolRuntimeError as error:
        _log.warning("a command's folder stays", folder=str(folder), error=str(error))
        return
    if output.exit_code:
        _log.warning("a command's folder stays", folder=str(folder), error=output.text.strip())
