"""The process of a model, from its start until it has ended."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import structlog
import trio

from trioserve.errors import ModelLoadError, ModelProcessError
from trioserve.router.forward import Kept, Outgoing, exchange
from trioserve.router.launch import LaunchedProcess, Launcher
from trioserve.router.zygote import ESTIMATE

_log = structlog.stdlib.get_logger("trioserve.router")

#: A process's report: ``state``, and its details.
Report: TypeAlias = Mapping[str, Any]

#: Lines of its log that are kept, and bytes of a line that are read as one.
_N_LINES = 20
_MAX_LINE = 64 * 1024

#: Seconds that the last output of a process may take to arrive after its end.
_LAST_WORDS = 1.0

#: What every line of our log has, which the router's own line has instead.
_OF_EACH_LINE = frozenset({"timestamp", "level", "logger", "event"})


async def ask_live(path: Path) -> int:
    """Ask the server at a Unix socket whether it lives; returns the status of its answer.

    Raises:
        ModelProcessError: no server listens, or the connection was closed without an answer.
    """
    async with exchange(path, Outgoing("GET", "/health/live", ())) as answer:
        return answer.status


@attrs.frozen(kw_only=True)
class HealthCheck:
    """How a process is watched. Times are in seconds.

    Attributes:
        start_timeout: seconds until its first report.
        interval: between two questions whether it lives.
        answer_timeout: in which it has to answer one.
        max_missed: this many in a row without a good answer are too many.
        ask: asks the server at a path; returns the status of the answer.
    """

    start_timeout: float = 120.0
    interval: float = 5.0
    answer_timeout: float = 10.0
    max_missed: int = 2
    ask: Callable[[Path], Awaitable[int]] = ask_live


class Child:
    """A process, which listens on a Unix socket once it has said so.

    `ended` is set as soon as it has ended, and `finished` when the fleet has taken note of that.
    `message` is why, as far as it is known, and `lines` is the end of its log. `asked` is whether
    `stop` was called.
    """

    def __init__(self, name: str, socket_path: Path, watch: HealthCheck) -> None:
        self.name = name
        self.socket_path = socket_path
        self.kept = Kept()
        self.pid: int | None = None
        self.info: Mapping[str, Any] = {}
        self.ended = trio.Event()
        self.finished = trio.Event()
        self.exit_code: int | None = None
        self.message: str | None = None
        self.lines: deque[str] = deque(maxlen=_N_LINES)
        self.asked = False
        self._complaint = ""  # the last line of its log that is an error, or no line of a log
        self._watching = watch
        self._process: LaunchedProcess | None = None
        self._spoke = trio.Event()
        self._stop = trio.Event()
        self._stop_timeout = 0.0

    async def run(
        self, launcher: Launcher, argv: Sequence[str], told: Callable[[Report], None]
    ) -> None:
        """Start the process, and stay with it until it has ended. When cancelled, it is killed.

        Raises:
            ModelLoadError: it cannot be started.
        """
        try:
            process = await launcher.launch(argv)
            self._process, self.pid = process, process.pid
            try:
                await self._attend(process, told)
            finally:
                process.send_signal(signal.SIGKILL)
                with trio.CancelScope(shield=True):
                    self.exit_code = await process.wait()
                process.close()
        finally:
            self._process = None
            self.kept.close()
            self.ended.set()

    def stop(self, timeout: float) -> None:
        """Have it finish its requests and end, within a time in seconds; 0: kill it."""
        self.asked = True
        self._stop_timeout = timeout
        self._stop.set()

    def kill(self, reason: str) -> None:
        """End it, because something is wrong with it."""
        _log.error("the process of a model is killed", model=self.name, reason=reason)
        self.message = reason
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    def last_words(self) -> str:
        """Why it has ended: a sentence."""
        if self.message is not None:
            return self.message
        how = "did not start" if self.exit_code is None else _how(self.exit_code)
        about = f": {self._complaint}" if self._complaint else "."
        return f"The process of the model {self.name!r} {how}{about}"

    async def _attend(self, process: LaunchedProcess, told: Callable[[Report], None]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._stop_when_asked, process)
            async with trio.open_nursery() as reading:
                reading.start_soon(self._read_status, process.status, told)
                reading.start_soon(self._read_log, process.log)
                self.exit_code = await process.wait()
                self.ended.set()
                told({"state": "ended"})
                reading.cancel_scope.deadline = trio.current_time() + _LAST_WORDS
            nursery.cancel_scope.cancel()

    async def _stop_when_asked(self, process: LaunchedProcess) -> None:
        await self._stop.wait()
        if self._stop_timeout > 0:
            process.send_signal(signal.SIGTERM)
            await trio.sleep(self._stop_timeout)
            _log.warning("the process of a model does not end in time", model=self.name,
                         seconds=self._stop_timeout)  # fmt: skip
        process.send_signal(signal.SIGKILL)

    # -- what it says

    async def _read_status(
        self, stream: trio.abc.ReceiveStream, told: Callable[[Report], None]
    ) -> None:
        lines = _LineSplitter()
        async for data in stream:
            self._spoke.set()
            for line in lines.add(data):
                try:
                    report = json.loads(line)
                except ValueError:
                    self.kill(f"What it told as its status is not JSON: {line!r:.100}.")
                    return
                self.message = report.get("message", self.message)
                self.info = report.get("info", self.info)
                told(report)

    async def _read_log(self, stream: trio.abc.ReceiveStream) -> None:
        lines = _LineSplitter()
        async for data in stream:
            for line in lines.add(data):
                self._relay(line)
        if lines.rest:
            self._relay(lines.rest.decode(errors="replace"))

    def _relay(self, line: str) -> None:
        """Write a line of its log to ours, and keep it."""
        fields = _fields_of(line)
        level = logging.getLevelNamesMapping().get(str(fields.get("level")).upper(), logging.INFO)
        if level >= logging.ERROR or "level" not in fields:
            self._complaint = str(fields["event"])
        rest = {name: value for name, value in fields.items() if name not in _OF_EACH_LINE}
        self.lines.append(
            " ".join([str(fields["event"]), *(f"{name}={value}" for name, value in rest.items())])
        )
        logger = structlog.stdlib.get_logger(fields.get("logger", "trioserve.child"))
        logger.log(level, fields["event"], **rest | {"model": self.name})

    # -- whether it lives

    async def _watch(self) -> None:
        """Kill it when it hangs."""
        watching = self._watching
        with trio.move_on_after(watching.start_timeout):
            await self._spoke.wait()
        if not self._spoke.is_set():
            self.kill(f"It did not start within {watching.start_timeout:g} seconds.")
            return
        n_missed = 0
        while True:
            await trio.sleep(watching.interval)
            problem = await self._problem()
            n_missed = n_missed + 1 if problem else 0
            if n_missed == watching.max_missed:
                self.kill(problem)
                return

    async def _problem(self) -> str:
        """What is wrong with it; empty if nothing is."""
        watching = self._watching
        with trio.move_on_after(watching.answer_timeout):
            try:
                status = await watching.ask(self.socket_path)
            except ModelProcessError as error:
                return error.message
            return "" if status == 200 else f"It says that it is stuck (status {status})."
        return f"It does not answer within {watching.answer_timeout:g} seconds."


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


class _LineSplitter:
    """Splits a stream into lines. `rest` is the line that is not complete yet."""

    def __init__(self) -> None:
        self.rest = b""

    def add(self, data: bytes | bytearray) -> list[str]:
        """Take more; returns the lines that are complete."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _MAX_LINE:
            lines.append(self.rest)
            self.rest = b""
        return [line.decode(errors="replace") for line in lines if line.strip()]


def _fields_of(line: str) -> dict[str, Any]:
    """Parse a line of the log; one that is not JSON, as when llama.cpp aborts, is its event."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) and "event" in fields else {"event": line}


async def estimate(launcher: Launcher, name: str, argv: Sequence[str]) -> int:
    """Estimate in a separate process how many bytes of memory a model would need.

    Raises:
        ModelLoadError: the model cannot be used, or the process cannot be started.
    """
    found: list[int] = []

    def told(report: Report) -> None:
        if report["state"] == "estimated":
            found.append(report["bytes"])

    child = Child(name, Path(), HealthCheck(interval=math.inf))
    await child.run(launcher, [ESTIMATE, *argv], told)
    if not found:
        raise ModelLoadError(child.last_words())
    return found[0]
