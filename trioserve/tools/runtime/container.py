"""`Container`: tools in a container that runs, and `OwnContainer`: in one that is started for
them."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import trio

from trioserve.errors import ToolRuntimeError
from trioserve.tools.process import Limits, Process, open_process
from trioserve.tools.runtime.isolate import Isolate

_log = logging.getLogger(__name__)

ENGINES = ("docker", "podman")

#: What begins with ``-`` would be an option.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:@_-]*")

#: Seconds to start a container, which may have to be downloaded.
_PATIENCE = 300.0

_READY = b"ready"
_MAX_WORDS = 2000


class Container(Isolate):
    """A container that runs already."""

    def __init__(self, engine: str, id_: str) -> None:
        """Reach it by its id or name, with ``docker`` or ``podman``.

        Raises:
            ToolRuntimeError: this is no id.
        """
        if not _ID.fullmatch(id_):
            raise ToolRuntimeError(f"invalid container id: {id_}")
        self._engine = engine
        self._id = id_

    async def argv(self, command: Sequence[str]) -> list[str]:
        """What runs a command there."""
        return [self._engine, "exec", "-i", self._id, *command]


class OwnContainer(Isolate):
    """A container that is started when it is needed, again if it ended, and removed at the end."""

    def __init__(self, engine: str, image: str, limits: Limits) -> None:
        """Make it of an image, with limits for all that runs in it.

        Raises:
            ToolRuntimeError: this is no name of an image.
        """
        if not _IMAGE.fullmatch(image):
            raise ToolRuntimeError(f"invalid image: {image}")
        self._engine = engine
        self._image = image
        self._limits = limits
        self._name = ""
        self._starting = trio.Lock()
        self._client: Process | None = None
        self._stack = AsyncExitStack()

    async def argv(self, command: Sequence[str]) -> list[str]:
        """What runs a command there, once it runs."""
        async with self._starting:
            if self._client is None or self._client.has_ended:
                await self.aclose()
                await self._start()
        return [self._engine, "exec", "-i", self._name, *command]

    async def aclose(self) -> None:
        """Remove it, if it runs. Is done within a time, also if cancelled."""
        self._client = None
        await self._stack.aclose()

    async def _start(self) -> None:
        self._name = f"trioserve-tools-{os.getpid()}-{secrets.token_hex(4)}"
        argv = [self._engine, "run", "--rm", "-i", "--name", self._name, *self._options()]
        # It is removed even when this process is killed, and ends even when all processes are: its
        # shell ends with standard input.
        last = [self._engine, "rm", "-f", self._name]
        try:
            with trio.fail_after(_PATIENCE):
                self._client = await self._stack.enter_async_context(
                    open_process([*argv, self._image, "sh"], env=os.environ, last=last)
                )
                await self._until_ready(self._client)
        except trio.TooSlowError:
            await self.aclose()
            raise ToolRuntimeError(
                f"{self._engine} has not started {self._image} within {_PATIENCE:g} seconds"
            ) from None
        except BaseException:
            await self.aclose()
            raise
        _log.info("tools run in the container %s of %s", self._name, self._image)

    def _options(self) -> list[str]:
        options = [f"--pids-limit={self._limits.processes}"]
        return options + ([f"--memory={self._limits.memory}"] if self._limits.memory else [])

    async def _until_ready(self, client: Process) -> None:
        assert client.stdin is not None and client.stderr is not None
        with suppress(trio.BrokenResourceError):
            await client.stdin.send_all(b"echo %s\n" % _READY)
        if _READY in await client.stdout.receive_some():
            return
        words = b""
        async for piece in client.stderr:
            words = (words + piece)[-_MAX_WORDS:]
        reason = words.decode(errors="replace").strip()
        raise ToolRuntimeError(f"{self._engine} cannot start {self._image}: {reason}")
