"""Runs the process of a model: a `Server` that answers the app which has started the process."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.children import reports
from trioserve.children.frames import FrameStream
from trioserve.children.parent import ParentSocket
from trioserve.cli.memory import keep_collecting, uncollected
from trioserve.cli.output import RED, note
from trioserve.cli.progress import Reporter, fetch
from trioserve.cli.signals import first_signal
from trioserve.config import Config
from trioserve.errors import TrioServeError, raised_alone
from trioserve.log import get_logger

if TYPE_CHECKING:
    from trioserve.model_process.serving import ModelProcess, Outbox
    from trioserve.server.lifecycle.engine import Loader
    from trioserve.server.server import Server

_log = get_logger("trioserve")

#: Seconds for what was said last to reach the app, when the engine has failed.
_FAREWELL = 3.0


class LogSender:
    """Sends the lines of the log to the app. Those of the event loop go with the next frame."""

    def __init__(self, parent: ParentSocket) -> None:
        self._parent = parent
        #: While calls are answered.
        self.outbox: Outbox | None = None

    def take(self, fields: MutableMapping[str, Any]) -> None:
        line, is_quiet = reports.Logged.of(fields), fields.get("level") in ("debug", "info")
        if is_quiet and self.outbox is not None and trio.lowlevel.in_trio_run():
            self.outbox.report(line)
        else:
            self._parent.send(msgspec.msgpack.encode(line))


def serve_parent(
    config: Config, status: Reporter, parent: ParentSocket, log: LogSender, where: str = ""
) -> int:
    """Serve the app until it has the process end. Blocks; returns the exit code.

    `where` is the path of a Unix socket for other apps, if there is one.
    """
    from trioserve.cli.serving import begin_load, check_models

    parent.end_with_it()
    with ExitStack() as closing:
        try:
            check_models(config)
        except TrioServeError as error:
            status.tell(reports.Failed.of(error.message))
            note(error.message, RED)
            return 1
        status.tell(reports.Loading(0.0))
        with uncollected():
            load = begin_load(config, status, closing)
            import trioserve.model_process.serving  # noqa: F401 - while the model loads
        code = trio.run(_serve, config, status, parent, load, log, where)
        parent.flush()
        return code


async def _serve(
    config: Config, status: Reporter, parent: ParentSocket, load: Loader, log: LogSender, where: str
) -> int:
    from trioserve.server.server import Server
    from trioserve.server.usage import Usage

    try:
        server = Server(await fetch(status, config), load=load, usage=Usage())
        process = process_of(server, parent)
        log.outbox = process.outbox
        collecting = partial(keep_collecting, lambda: server.memory.n_held)
        draining = partial(_drain_at_signal, process, status)
        await answer(process, status, parent, draining, collecting, where=where)
    except Exception as group:
        error = raised_alone(group)
        message = error.message if isinstance(error, TrioServeError) else repr(error)
        _log.error(message, exc_info=None if isinstance(error, TrioServeError) else error)
        status.tell(reports.Failed.of(message))
        return 1
    return 0


def process_of(
    server: Server, parent: ParentSocket, outboxes: list[Outbox] | None = None
) -> ModelProcess:
    """Make what answers the app at the other end of a socket, beside those of other outboxes."""
    from trioserve.model_process.serving import MAX_ORDER, ModelProcess, Outbox

    async def wait_sent() -> None:
        while not parent.flush():
            await trio.lowlevel.wait_writable(parent.connection)

    outbox = Outbox(parent, wait_sent)
    orders = FrameStream(parent.connection, MAX_ORDER)
    return ModelProcess(server, orders.receive, outbox, [] if outboxes is None else outboxes)


async def answer(
    process: ModelProcess,
    status: Reporter,
    parent: ParentSocket,
    draining: Callable[..., Awaitable[None]],
    *beside: Callable[[], Awaitable[None]],
    where: str = "",
) -> None:
    """Load the model and answer the app, until that has the process end.

    Args:
        process: answers.
        status: gets the reports about the model.
        parent: the same socket.
        draining: waits until the process is to drain, from before the app may ask for that.
        beside: runs while the model is in memory.
        where: as of `serve_parent`.

    Raises:
        TrioServeError: the model cannot be loaded, or the engine has failed.
    """
    from trioserve.cli.serving import follow_state, report_usage, tell_ready

    def introduce() -> None:
        parent.send(process.introduction())

    server = process.server
    async with trio.open_nursery() as watching:
        watching.start_soon(_until_end, process, watching.cancel_scope)  # also while it loads
        async with server, trio.open_nursery() as nursery:
            tell_ready(server)
            introduce()
            if where:
                await nursery.start(_listen, process, where)
            else:
                nursery.start_soon(report_usage, server, status)
            await nursery.start(draining)
            status.tell(reports.Ready())
            nursery.start_soon(follow_state, server, status, introduce)
            nursery.start_soon(_until_failure, process)
            for each in beside:
                nursery.start_soon(each)


async def _until_end(process: ModelProcess, scope: trio.CancelScope) -> None:
    await process.run()
    scope.cancel()


async def _listen(process: ModelProcess, where: str, task_status: trio.TaskStatus[None]) -> None:
    """Answer other apps, which connect to a Unix socket, as the one that has started this."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
        listener.listen()
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(listener)
                connection, _ = listener.accept()
                nursery.start_soon(answer_other, process, connection)


async def answer_other(process: ModelProcess, connection: socket.socket) -> None:
    """Answer an app that has connected until it leaves. One of them gets a report of usage."""
    from trioserve.cli.serving import follow_state, report_usage

    server = process.server
    with connection:
        parent = ParentSocket(connection)
        status, other = Reporter(parent), process_of(server, parent, process.outboxes)
        try:
            parent.send(other.introduction())
            status.tell(reports.Sleeping() if server.sleeping else reports.Ready())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(report_usage, server, status)
                nursery.start_soon(
                    follow_state, server, status, lambda: parent.send(other.introduction())
                )
                await _until_end(other, nursery.cancel_scope)
        except Exception as group:  # it says what cannot be
            _log.error("an app is not answered any more", exc_info=raised_alone(group))
        finally:
            process.outboxes.remove(other.outbox)


async def _drain_at_signal(
    process: ModelProcess, status: Reporter, task_status: trio.TaskStatus[None]
) -> None:
    await first_signal(task_status)
    await drain(process, status)


async def drain(process: ModelProcess, status: Reporter) -> None:
    """Let what runs finish, and end."""
    status.tell(reports.Draining())
    await process.drain(process.server.config.drain_timeout)


async def _until_failure(process: ModelProcess) -> None:
    """Wait until the engine has failed and the app has been told, then raise the failure."""
    failure = await process.server.lifecycle.wait_failure()
    if process.server.config.on_engine_failure == "stay":
        await trio.sleep_forever()
    with trio.move_on_after(_FAREWELL):
        await process.outbox.until_empty()
    raise failure
