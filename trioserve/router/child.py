"""The process of a model, from its start until it has ended."""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import trio

from trioserve.children.child import Child, how
from trioserve.children.frames import FrameError
from trioserve.children.launch import Launcher
from trioserve.children.lines import Lines
from trioserve.children.reports import BESIDE, ESTIMATE, Estimated, Failed, Logged, Report
from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.config.readers import unicode_name
from trioserve.errors import ModelLoadError, ModelProcessError, ServerClosingError, TrioServeError
from trioserve.log import get_logger
from trioserve.model_process.connection import Connection, Line, ask, converse
from trioserve.model_process.messages import Introduced
from trioserve.models.catalog import ModelEntry
from trioserve.router.schedule import Instance
from trioserve.router.states import ModelState
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer

_log = get_logger("trioserve.router")

#: Lines of its log that are kept, and bytes of a line that are read as one.
_N_LINES = 20
_MAX_LINE = 64 * 1024

#: Seconds that the last output of a process may take to arrive after its end.
_LAST_WORDS = 1.0

#: Seconds that a process has to end after its requests.
_GRACE = 5.0

#: The fields of every line of our log, which the router's own line has instead; and `self`, which
#: is an argument of a logger.
_OF_EACH_LINE = frozenset({"timestamp", "level", "logger", "event", "self"})

#: The beginning of the line that llama.cpp writes before it aborts: a place in its sources. A
#: debugger that it starts then writes more lines.
_ABORT = re.compile(r"\S+\.\w+:\d+: |GGML_ASSERT")


async def ask_live(line: Line) -> None:
    """Ask a process whether it lives.

    Raises:
        ModelProcessError: it has ended.
        UnavailableError: its engine is stuck.
    """
    await ask(line, ModelServer.check_live)


@attrs.frozen(kw_only=True)
class HealthCheck:
    """The limits of a process that is watched, in seconds."""

    start_timeout: float = 120.0  # seconds until its first report
    interval: float = 5.0  # between two questions whether it lives
    answer_timeout: float = 10.0  # in which it has to answer one
    max_missed: int = 2  # this many in a row without a good answer are too many
    #: Asks a process; raises TrioServeError if it is not well.
    ask: Callable[[Line], Awaitable[None]] = ask_live


@attrs.define(eq=False, kw_only=True)
class ModelChild(Instance):
    """A model's process, from before its start until it has ended, and afterwards how it ended.

    `line` leads to it. `ended` is set as soon as it has ended, and
    `finished` when the fleet has taken note of that. `message` is why, as far as it is known, and
    `lines` is the end of its log.
    """

    entry: ModelEntry
    watch: HealthCheck
    environ: Mapping[str, str] = attrs.field(factory=dict)
    line: Connection = attrs.field(factory=Connection)
    #: Its configuration, once its model has been loaded.
    config: Config | None = None
    pid: int | None = None
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
    _process: Child | None = None
    _spoke: trio.Event = attrs.field(factory=trio.Event)
    _stop: trio.Event = attrs.field(factory=trio.Event)
    _stop_timeout: float = 0.0
    _unused: trio.Event = attrs.field(factory=trio.Event)

    @property
    def failed(self) -> bool:
        """True if it ended unexpectedly."""
        return self.finished.is_set() and not self.was_stopped

    async def run(
        self, launcher: Launcher, argv: Sequence[str], on_report: Callable[[Report | None], None]
    ) -> None:
        """Start the process, and stay with it until it has ended. When cancelled, it is killed.

        Args:
            on_report: called with its reports, and with None when no more come, or it has ended.

        Raises:
            ModelLoadError: it cannot be started.
        """
        try:
            process = await launcher.launch(argv)
            self._process, self.pid = process, process.pid
            try:
                await self._attend(process, on_report)
            finally:
                self.exit_code = await process.aend()
        finally:
            self._process = self.pid = None
            self.line.close(ModelProcessError())
            self.ended.set()

    def stop(self, timeout: float) -> None:
        """Have it end when its requests have, within a time in seconds; 0: at once."""
        self._stop_timeout = timeout
        self._stop.set()
        self.note_use()

    def note_use(self) -> None:
        """Note that a request has begun or ended."""
        self.used_at = time.time()
        if self._stop.is_set() and not self.n_users:
            self._unused.set()

    def kill(self, reason: str) -> None:
        """Kill the process and log the reason."""
        _log.error("the process of a model is killed", model=self.name, reason=reason)
        self.message = reason
        if self._process is not None:
            self._process.kill()

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
            args=self.entry.args,
            pid=self.pid,
            progress=self.progress,
            exit_code=self.exit_code if has_ended else None,
            last_used=self.used_at,
            memory_used=None if has_ended else self.memory_used,
            memory_gpus=() if has_ended else self.gpus,
            failed=self.failed,
        )
        if not self.failed:
            return state
        return attrs.evolve(state, message=self.last_words(), log_tail=tuple(self.lines))

    async def _attend(self, process: Child, on_report: Callable[[Report | None], None]) -> None:
        async with (
            alongside(self._watch_over, partial(self._stop_when_asked, process)),
            trio.open_nursery() as reading,
        ):
            reading.start_soon(self._converse, process.socket, on_report)
            reading.start_soon(self._read_log, process.read_log)
            self.exit_code = await process.ended()
            self.ended.set()
            on_report(None)
            reading.cancel_scope.deadline = trio.current_time() + _LAST_WORDS

    async def _stop_when_asked(self, process: Child) -> None:
        await self._stop.wait()
        if (seconds := self._stop_timeout) > 0:
            # Requests that are made of several, as runs of tools are, finish before it drains.
            with trio.move_on_after(seconds) as waiting:
                await self._unused.wait()
            if waiting.cancelled_caught:
                self.line.refuse(ServerClosingError.after(seconds))
            process.terminate()
            await trio.sleep_until(max(waiting.deadline, trio.current_time() + _GRACE))
            _log.warning("the process of a model does not end in time", model=self.name)
        process.kill()

    # -- what it says

    async def _converse(
        self, connection: socket.socket, on_report: Callable[[Report | None], None]
    ) -> None:
        def take(report: Report) -> None:
            self._spoke.set()
            match report:
                case Failed(message):
                    self.message = message
                case Logged(fields):
                    self._log(fields)
            on_report(report)

        try:
            await converse(self.line, connection, self._learn, take)
        except (FrameError, TrioServeError) as error:
            self.kill(f"Its socket is broken: {error}.")
        finally:
            on_report(None)

    def _learn(self, introduced: Introduced) -> LoadedModel:
        """Learn what the model is. It is slow."""
        self.config = parse(self.entry.args, self.environ).config
        return introduced.learn(self.config)

    async def _read_log(self, read: Callable[[], Awaitable[bytes]]) -> None:
        lines = Lines(_MAX_LINE, cut=True)
        while data := await read():
            for line in lines.feed(data):
                self._relay(line)
        self._relay(lines.rest)

    def _relay(self, line: bytes) -> None:
        """Write a line of its log to ours, and keep it. Empty ones are left out."""
        if not line.strip():
            return
        self._log(_fields_of(line.decode(errors="replace")))

    def _log(self, fields: Mapping[str, Any]) -> None:
        level = logging.getLevelNamesMapping().get(str(fields.get("level")).upper(), logging.INFO)
        if (level >= logging.ERROR or "level" not in fields) and not _ABORT.match(self._complaint):
            self._complaint = str(fields.get("event"))
        event = str(fields.get("event"))
        rest = {name: value for name, value in fields.items() if name not in _OF_EACH_LINE}
        self.lines.append(" ".join([event, *(f"{name}={value}" for name, value in rest.items())]))
        logger = get_logger(str(fields.get("logger", "trioserve.child")))
        logger.log(level, event, **rest | {"model": self.name})

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
        """The problem of the process; empty if it is well."""
        watching = self.watch
        with trio.move_on_after(watching.answer_timeout):
            try:
                await watching.ask(self.line)
            except ModelProcessError as error:
                return error.message
            except TrioServeError as error:
                return f"It says that it is stuck: {error.message}"
            return ""
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
        others: bytes of RAM that the other models would free: what the model needs is then what it
            would choose without them. None: llama.cpp's estimate of all its memory.

    Raises:
        ModelLoadError: the model cannot be used, or the process cannot be started.
    """
    found: list[Estimated] = []

    def on_report(report: Report | None) -> None:
        if isinstance(report, Estimated):
            found.append(report)

    watch = HealthCheck(interval=math.inf)
    child = ModelChild(entry.name, 0, entry=entry, watch=watch)
    how = [] if others is None else [f"{BESIDE}{others}"]
    await child.run(launcher, [ESTIMATE, *how, *entry.args], on_report)
    if not found:
        raise ModelLoadError(child.last_words())
    return found[0]
