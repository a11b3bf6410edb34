"""Processes of models in name only: each runs in a task, at the other end of a real socket."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import attrs
import trio

from tests.support.scripted_children import entry
from trioserve.children import reports
from trioserve.children.frames import framed
from trioserve.children.parent import ParentSocket
from trioserve.children.reports import Report
from trioserve.cli.model_process import answer, drain, process_of
from trioserve.cli.progress import Reporter
from trioserve.config import Config
from trioserve.errors import TrioServeError, raised_alone
from trioserve.model_process.messages import Introduced
from trioserve.model_process.server import ChildServer
from trioserve.model_process.serving import ModelProcess
from trioserve.router.child import HealthCheck, ModelChild
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.model import LoadedModel
from trioserve.server.server import Server
from trioserve.server.usage import Usage
from trioserve.testing import ScriptedBackend, scripted
from trioserve.tools.registry import ToolRegistry

_pids = count(2000)


@attrs.define(eq=False)
class InName:
    """A process in name only, as the test sees it.

    Attributes:
        config: of its server.
        load: gives its engine.
        silent: whether it reads no calls once it is ready.
    """

    config: Config
    load: Callable[..., Any]
    silent: bool = False
    pid: int = attrs.field(factory=lambda: next(_pids))
    signals: list[signal.Signals] = attrs.field(factory=list)
    #: Its end of the socket, for what no server says.
    end: socket.socket | None = None
    socket: socket.socket = attrs.field(init=False)
    _process: ModelProcess | None = None
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _asked_to_end: trio.Event = attrs.field(factory=trio.Event)
    _code: int = 0
    _has_ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def server(self) -> Server:
        """The server in the process."""
        assert self._process is not None
        return self._process.server

    def say(self, payload: bytes) -> None:
        """Send a frame that no server sends."""
        assert self.end is not None
        self.end.sendall(framed(payload))

    def die(self) -> None:
        """Die at once."""
        self.kill()

    # -- as with a `Child`

    def kill(self) -> None:
        """Have it die."""
        if self._has_ended.is_set():
            return
        self.signals.append(signal.SIGKILL)
        self._code = -signal.SIGKILL
        if self.end is not None:
            self.end.shutdown(socket.SHUT_RDWR)
        self._has_ended.set()  # the rest of it has no more effect
        self._scope.cancel()

    def terminate(self) -> None:
        """Have it end."""
        if not self._has_ended.is_set():
            self.signals.append(signal.SIGTERM)
            self._asked_to_end.set()

    async def ended(self) -> int:
        """Wait for its end."""
        await self._has_ended.wait()
        return self._code

    async def aend(self) -> int:
        """Kill it."""
        self.kill()
        with trio.CancelScope(shield=True):
            code = await self.ended()
        self.socket.close()
        return code

    async def read_log(self) -> bytes:
        """It writes nothing."""
        await trio.lowlevel.checkpoint()
        return b""

    async def run(self, end: socket.socket) -> None:
        """Run in a task of the test."""
        self.end = end
        status = Reporter(parent := ParentSocket(end))
        try:
            with self._scope:
                server = Server(self.config, load=self.load, usage=Usage())
                process = self._process = process_of(server, parent)
                if self.silent:
                    process._receive = trio.sleep_forever
                await answer(process, status, parent, partial(self._drain, process, status))
        except Exception as group:
            error = raised_alone(group)
            assert isinstance(error, TrioServeError), repr(error)
            status.tell(reports.Failed.of(error.message))
            self._code = self._code or 1
        finally:
            end.close()
            self._has_ended.set()

    async def _drain(
        self,
        process: ModelProcess,
        status: Reporter,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        task_status.started()
        await self._asked_to_end.wait()
        await drain(process, status)


#: Makes the process of a model.
Make: TypeAlias = Callable[[Sequence[str]], InName]


@attrs.define(eq=False)
class LauncherInName:
    """Starts processes in name only.

    Attributes:
        nursery: has their tasks.
        make: makes each, by its arguments.
        started: all that were started.
    """

    nursery: trio.Nursery
    make: Make
    started: list[InName] = attrs.field(factory=list)

    async def launch(self, argv: Sequence[str]) -> InName:
        """See `Launcher.launch`."""
        await trio.lowlevel.checkpoint()
        process = self.make(argv)
        self.started.append(process)
        process.socket, theirs = socket.socketpair()
        self.nursery.start_soon(process.run, theirs)
        return process


class ChildInName(ModelChild):
    """A `ModelChild` whose configuration is that of its process, which no arguments say."""

    settings: Config

    def _learn(self, introduced: Introduced) -> LoadedModel:
        self.config = self.settings
        return introduced.learn(self.settings)


async def child_of(
    nursery: trio.Nursery,
    load: Callable[..., Any],
    config: Config,
    name: str = "one",
    *,
    silent: bool = False,
    on_usage: Callable[[str, Any], None] = lambda *_: None,
) -> tuple[ChildInName, InName]:
    """Start a process in name only; gives it as the router and as the test see it."""
    process = InName(config, load, silent=silent)
    ready = trio.Event()

    def told(report: Report | None) -> None:
        if isinstance(report, reports.Usage):
            on_usage(name, report.rows)
        elif report is None or isinstance(report, reports.Ready):
            ready.set()

    launcher = LauncherInName(nursery, lambda _argv: process)
    watch = HealthCheck(interval=1e9)
    child = ChildInName(name, 0, entry=entry(name), watch=watch)
    child.settings = config
    nursery.start_soon(child.run, launcher, [], told)
    await ready.wait()
    assert child.config in (None, config)
    return child, process


@attrs.frozen
class OneModel:
    """A model as the app sees it, and its process as the app and the test do."""

    server: ChildServer
    child: ChildInName
    process: InName


@asynccontextmanager
async def one_model(
    backend: Any = None, *, silent: bool = False, **config: Any
) -> AsyncIterator[OneModel]:
    """Have a process in name only for a block, with a backend or a function that loads one."""
    settings = Config(**{"stream_interval_ms": 0, **config})
    load = backend if callable(backend) else scripted(backend or ScriptedBackend())
    async with trio.open_nursery() as nursery:
        child, process = await child_of(nursery, load, settings, silent=silent)
        memory = MemoryBudget.of(settings)
        server = ChildServer(child.line, settings, tools=ToolRegistry(), memory=memory)
        yield OneModel(server, child, process)
        nursery.cancel_scope.cancel()
