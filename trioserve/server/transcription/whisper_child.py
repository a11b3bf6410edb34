"""The child process that runs Whisper, as an object: jobs go in, events come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import attrs
import trio

import trioserve.media
from trioserve.errors import DeadlineExceededError, TranscriberError

_PROGRAM = Path(trioserve.media.__file__).with_name("whisper.py")

#: More threads gain little, and other requests have their own.
_MAX_THREADS = 4


@attrs.frozen(kw_only=True)
class WhisperSettings:
    """What to run."""

    model: str  # a directory, or a name
    offline: bool = False
    python: str = sys.executable  # which has faster-whisper


class WhisperChild:
    """A process that has loaded a model. It does one job at a time.

    Raises:
        DeadlineExceededError: from what waits: the deadline has passed.
        TranscriberError: from what waits: the process has failed or ended.
    """

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._unread = bytearray()
        self.languages: frozenset[str] = frozenset()

    @classmethod
    async def start(cls, settings: WhisperSettings, deadline: float) -> Self:
        """Start a process, and wait until it has loaded its model."""
        # The folder of a program is no place to import from: `-P`.
        arguments = {
            "model": settings.model,
            "n_threads": min(_MAX_THREADS, os.cpu_count() or 1),
            "offline": settings.offline,
        }
        command = [settings.python, "-P", str(_PROGRAM), json.dumps(arguments)]
        try:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl+C is for the server, which ends the process itself
            )
        except OSError as error:
            raise TranscriberError(f"Whisper cannot be started: {error}") from error
        child = cls(process)
        try:
            ready = await child.receive(deadline)
            child.languages = frozenset(ready["ready"]["languages"])
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job, as far as is known."""
        return self._process.poll() is None

    async def send(self, fields: dict[str, Any], samples: bytes, deadline: float) -> None:
        """Begin a job."""
        assert self._process.stdin is not None
        head = json.dumps({**fields, "n_bytes": len(samples)}) + "\n"
        with trio.move_on_at(deadline) as scope:
            try:
                await self._process.stdin.send_all(head.encode())
                await self._process.stdin.send_all(samples)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise await self._end() from error
        if scope.cancelled_caught:
            raise DeadlineExceededError("The request's deadline has passed.")

    async def receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the next event."""
        with trio.move_on_at(deadline) as scope:
            line = await self._line()
        if scope.cancelled_caught:
            raise DeadlineExceededError("The request's deadline has passed.")
        event: dict[str, Any] = json.loads(line)
        if "error" in event:
            raise TranscriberError(f"Whisper failed: {event['error']}")
        return event

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        while (end := self._unread.find(b"\n")) < 0:
            try:
                data = await self._process.stdout.receive_some()
            except trio.ClosedResourceError:  # it was killed meanwhile
                data = b""
            if not data:
                raise await self._end()
            self._unread += data
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    async def _end(self) -> TranscriberError:
        """Make the error of a process that has ended."""
        await self.kill()
        return TranscriberError(
            f"The process that runs Whisper has ended, with exit code {self._process.returncode}."
        )

    async def kill(self) -> None:
        """End the process at once. It is over when this returns, also when that is cancelled."""
        self._process.kill()
        with trio.CancelScope(shield=True):
            await self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                await pipe.aclose()
