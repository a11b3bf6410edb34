"""The process of a model, from its start until it has ended."""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.children.child import how
from trioserve.children.frames import FrameError, FrameReader
from trioserve.children.launch import Launched, Launcher
from trioserve.children.lines import Lines
from trioserve.children.reports import (
    BESIDE,
    ESTIMATE,
    MAX_REPORT,
    Estimated,
    Failed,
    Ready,
    Report,
    decode,
)
from trioserve.concurrency import alongside
from trioserve.config.readers import unicode_name
from trioserve.errors import ModelLoadError, ModelProcessError
from trioserve.log import get_logger
from trioserve.models.catalog import ModelEntry
from trioserve.router.forward import Kept, Outgoing, exchange
from trioserve.router.schedule import Instance
from trioserve.router.states import ModelState

_log = get_logger("trioserve.router")

#: Lines of its log that are kept, and bytes of a line that are read as one.
_N_LINES = 20
_MAX_LINE = 64 * 1024

#: Seconds that the last output of a process may take to arrive after its end.
_LAST_WORDS = 1.0

#: What every line of our log has, which the router's own line has instead.
_OF_EACH_LINE = frozenset({"timestamp", "level", "logger", "event"})

#: The beginning of the line that llama.cpp writes before it aborts: a place in its sources. A
#: debugger that it starts then writes more lines.
_ABORT = re.compile(r"\S+\.\w+:\d+: |GGML_ASSERT")


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


@attrs.define(eq=False, kw_only=True)
class Child(Instance):
    """A model's process, from before its start until it has ended, and afterwards how it ended.

    It listens on a Unix socket once it has said so. `ended` is set as soon as it has ended, and
    `finished` when the fleet has taken note of that. `message` is why, as far as it is known, and
    `lines` is the end of its log.
    """

    entry: ModelEntry
    socket_path: Path
    watch: HealthCheck
    kept: Kept = attrs.field(factory=Kept)
    pid: int | None = None
    info: Mapping[str, Any] = attrs.field(factory=dict)
    #: The share that is loaded, 0.0 to 1.0, while it loads.
    progress: float | None = None
    #: Bytes of RAM that it was measured to have.
    memory_used: int | None = None
    #: When a request last began or ended, in seconds since the epoch.
    used_at: float = attrs.field(factory=time.time)
    ended: trio.Event = attrs.field(factory=trio.Event)
    finished: trio.Event = attrs.field(factory=trio.Event)
    exit_code: int | None = None
    message: str | None = None
    lines: deque[str] = attrs.field(factory=lambda: deque(maxlen=_N_LINES))
    _complaint: str = ""  # the last line of its log that is an error, or no line of a log
    _process: Launched | None = None
    _spoke: trio.Event = attrs.field(factory=trio.Event)
    _stop: trio.Event = attrs.field(factory=trio.Event)
    _stop_timeout: float = 0.0

    @property
    def args(self) -> tuple[str, ...]:
        """The flags of its process."""
        return (*self.entry.args, "--host", str(self.socket_path))

    @property
    def failed(self) -> bool:
        """Whether it ended unexpectedly."""
        return self.finished.is_set() and not self.was_stopped

    async def run(
        self, launcher: Launcher, argv: Sequence[str], told: Callable[[Report | None], None]
    ) -> None:
        """Start the process, and stay with it until it has ended. When cancelled, it is killed.

        Args:
            launcher: starts it.
            argv: its arguments.
            told: called with its reports, and with None as soon as it has ended.

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
            self._process = self.pid = None
            self.kept.close()
            self.ended.set()

    def stop(self, timeout: float) -> None:
        """Have it finish its requests and end, within a time in seconds; 0: kill it."""
        self._stop_timeout = timeout
        self._stop.set()

    def kill(self, reason: str) -> None:
        """Kill the process and log the reason."""
        _log.error("the process of a model is killed", model=self.name, reason=reason)
        self.message = reason
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    def last_words(self) -> str:
        """Why it has ended: a sentence."""
        if self.message is not None:
            return self.message
        ended = "did not start" if self.exit_code is None else how(self.exit_code)
        about = f": {self._complaint}" if self._complaint else ""
        path = self.entry.path
        file = "" if path is None else f" Its file is {unicode_name(str(path))}."
        return f"The process of the model {self.name!r} {ended}{about.rstrip('.')}.{file}"

    def state(self) -> ModelState:
        """The model as far as its process shows it, now or when it ended."""
        has_ended = self.finished.is_set()
        state = ModelState(
            value=self.status,
            args=self.args,
            pid=self.pid,
            socket_path=None if has_ended else self.socket_path,
            progress=self.progress,
            info=self.info,
            exit_code=self.exit_code if has_ended else None,
            last_used=self.used_at,
            memory_used=None if has_ended else self.memory_used,
            memory_gpus=() if has_ended else self.gpus,
            failed=self.failed,
        )
        if not self.failed:
            return state
        return attrs.evolve(state, message=self.last_words(), log_tail=tuple(self.lines))

    async def _attend(self, process: Launched, told: Callable[[Report | None], None]) -> None:
        async with (
            alongside(self._watch_over, partial(self._stop_when_asked, process)),
            trio.open_nursery() as reading,
        ):
            reading.start_soon(self._read_reports, process.frames, told)
            reading.start_soon(self._read_log, process.log)
            self.exit_code = await process.wait()
            self.ended.set()
            told(None)
            reading.cancel_scope.deadline = trio.current_time() + _LAST_WORDS

    async def _stop_when_asked(self, process: Launched) -> None:
        await self._stop.wait()
        if self._stop_timeout > 0:
            process.send_signal(signal.SIGTERM)
            await trio.sleep(self._stop_timeout)
            _log.warning("the process of a model does not end in time", model=self.name,
                         seconds=self._stop_timeout)  # fmt: skip
        process.send_signal(signal.SIGKILL)

    # -- what it says

    async def _read_reports(
        self, stream: trio.abc.ReceiveStream, told: Callable[[Report], None]
    ) -> None:
        frames = FrameReader(MAX_REPORT)
        with suppress(trio.BrokenResourceError):  # it has ended without reading all
            async for data in stream:
                self._spoke.set()
                try:
                    self._take(map(decode, frames.feed(data)), told)
                except FrameError as error:
                    self.kill(f"Its socket is broken: {error}.")
                    return

    def _take(self, reports: Iterable[Report], told: Callable[[Report], None]) -> None:
        for report in reports:
            match report:
                case Failed(message):
                    self.message = message
                case Ready(dict(info)):
                    self.info = info
            told(report)

    async def _read_log(self, stream: trio.abc.ReceiveStream) -> None:
        lines = Lines(_MAX_LINE, cut=True)
        async for data in stream:
            for line in lines.feed(data):
                self._relay(line)
        self._relay(lines.rest)

    def _relay(self, line: bytes) -> None:
        """Write a line of its log to ours, and keep it. Empty ones are left out."""
        if not line.strip():
            return
        fields = _fields_of(line.decode(errors="replace"))
        level = logging.getLevelNamesMapping().get(str(fields.get("level")).upper(), logging.INFO)
        if (level >= logging.ERROR or "level" not in fields) and not _ABORT.match(self._complaint):
            self._complaint = str(fields["event"])
        rest = {name: value for name, value in fields.items() if name not in _OF_EACH_LINE}
        self.lines.append(
            " ".join([str(fields["event"]), *(f"{name}={value}" for name, value in rest.items())])
        )
        logger = get_logger(fields.get("logger", "trioserve.child"))
        logger.log(level, fields["event"], **rest | {"model": self.name})

    # -- whether it lives

    async def _watch_over(self) -> None:
        """Kill it when it hangs."""
        watching = self.watch
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
        watching = self.watch
        with trio.move_on_after(watching.answer_timeout):
            try:
                status = await watching.ask(self.socket_path)
            except ModelProcessError as error:
                return error.message
            return "" if status == 200 else f"It says that it is stuck (status {status})."
        return f"It does not answer within {watching.answer_timeout:g} seconds."


def _fields_of(line: str) -> dict[str, Any]:
    """Parse a line of the log; one that is not JSON, as when llama.cpp aborts, is its event."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) and "event" in fields else {"event": line}


async def estimate(launcher: Launcher, entry: ModelEntry, others: int | None = None) -> Estimated:
    """Estimate in a separate process how many bytes of memory a model would need.

    Args:
        launcher: starts the process.
        entry: the model.
        others: bytes of RAM that the other models would free: what the model needs is then what it
            would choose without them. None: llama.cpp's estimate of all its memory.

    Raises:
        ModelLoadError: the model cannot be used, or the process cannot be started.
    """
    found: list[Estimated] = []

    def told(report: Report | None) -> None:
        if isinstance(report, Estimated):
            found.append(report)

    watch = HealthCheck(interval=math.inf)
    child = Child(entry.name, 0, entry=entry, socket_path=Path(), watch=watch)
    how = [] if others is None else [f"{BESIDE}{others}"]
    await child.run(launcher, [ESTIMATE, *how, *entry.args], told)
    if not found:
        raise ModelLoadError(child.last_words())
    return found[0]
