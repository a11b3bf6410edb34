"""The server of a model as a child of a replica: its start, its health and its end, in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trioserve.errors import ModelLoadError, ModelProcessError
from trioserve.ray.exchange import exchange
from trioserve.router.launch import (
    COMMAND,
    LIFELINE_VARIABLE,
    STATUS_VARIABLE,
    with_package,
)
from trioserve.router.wire import Outgoing

_log = logging.getLogger("ray.serve")

#: Seconds in which a child has to say something after its start, and to answer whether it lives.
_START_TIMEOUT = 120.0
_ANSWER_TIMEOUT = 10.0


class Child:
    """A server in a process of its own, which listens on a Unix socket.

    Its standard input is a lifeline, so it ends when this process does, however that comes. What it
    logs goes where this process logs.

    Args:
        socket_path: where it listens.
        argv: its flags, but for the socket.
        environ: its environment.
    """

    def __init__(
        self,
        socket_path: Path,
        argv: Sequence[str],
        environ: Mapping[str, str],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.socket_path = socket_path
        self.info: Mapping[str, Any] = {}
        self.ended = asyncio.Event()
        self._argv = (*command, *argv, "--host", str(socket_path))
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline = -1
        self._message = ""
        self._told: asyncio.Queue[str] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, and wait until its model is loaded. If that fails or is cancelled, it ends.

        Raises:
            ModelLoadError: it cannot be started, or it cannot load its model.
        """
        stdin, self._lifeline = os.pipe()
        status, status_end = os.pipe()
        told = {STATUS_VARIABLE: str(status_end), LIFELINE_VARIABLE: "1"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=stdin,
                pass_fds=[status_end],
                env=with_package(self._environ) | told,
                start_new_session=True,
            )
        except OSError as error:
            os.close(status)
            self._cut()
            raise ModelLoadError(
                f"The process of the model cannot be started: {error.strerror}."
            ) from None
        finally:
            os.close(stdin)
            os.close(status_end)
        self._tasks = [
            asyncio.create_task(self._read_status(status)),
            asyncio.create_task(self._wait()),
        ]
        try:
            await self._until_ready()
        except BaseException:
            await self.stop(0)
            raise

    async def _until_ready(self) -> None:
        timeout: float | None = _START_TIMEOUT
        while True:
            try:
                state = await asyncio.wait_for(self._told.get(), timeout)
            except TimeoutError:
                raise ModelLoadError(
                    f"The process of the model did not start within {timeout:g} seconds."
                ) from None
            if state == "ready":
                return
            if state in ("failed", "ended"):
                raise ModelLoadError(self.last_words())
            timeout = None  # a download may take long

    async def _read_status(self, descriptor: int) -> None:
        """Take note of what it tells, until it ends."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
        )
        try:
            async for line in reader:
                report = json.loads(line)
                self._message = report.get("message", self._message)
                self.info = report.get("info", self.info)
                self._told.put_nowait(report["state"])
        finally:
            transport.close()

    async def _wait(self) -> None:
        assert self._process is not None
        await self._process.wait()
        with contextlib.suppress(TimeoutError):  # what it told last may still be on its way
            await asyncio.wait_for(asyncio.shield(self._tasks[0]), 1.0)
        self.ended.set()
        self._told.put_nowait("ended")

    async def problem(self) -> str:
        """Ask whether it lives; returns what is wrong, and nothing if nothing is."""
        if self.ended.is_set():
            return self.last_words()
        try:
            async with (
                asyncio.timeout(_ANSWER_TIMEOUT),
                exchange(self.socket_path, Outgoing("GET", "/health/live", ())) as answer,
            ):
                status = answer.status
        except TimeoutError:
            return f"The process of the model does not answer within {_ANSWER_TIMEOUT:g} seconds."
        except ModelProcessError as error:
            return error.message
        return "" if status == 200 else f"The model is stuck: its server answers {status}."

    def last_words(self) -> str:
        """Why it has ended."""
        code = None if self._process is None else self._process.returncode
        if self._message:
            return self._message
        how = f"was ended by signal {-code}" if code and code < 0 else f"ended with code {code}"
        return f"The process of the model {how}; what it said is in the log of its replica."

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self, timeout: float) -> None:
        """Let it finish its requests, within so many seconds, and end. Then it is killed."""
        process = self._process
        if process is None:
            return
        if timeout > 0 and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), timeout)
        self.kill()
        await asyncio.shield(self.ended.wait())
        self._cut()

    def _cut(self) -> None:
        """Close the lifeline."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
