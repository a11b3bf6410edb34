"""A replica: an actor of Ray with the process of a model, and leases of it.

An ingress that has a lease connects to the replica, which passes the bytes on to the process. Ray
does not notify a replica when its caller dies, so the leases of an ingress end with its connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from trioserve.children.launch import open_launcher
from trioserve.children.reports import AT, MODEL, Ready, Report
from trioserve.config import Config, logs
from trioserve.config.parse import argv_of, parse
from trioserve.errors import ModelLoadError, ModelProcessError, TrioServeError
from trioserve.model_process.connection import ask
from trioserve.models import BUNDLED
from trioserve.models.catalog import ModelEntry, Source, environment_of_children
from trioserve.models.catalog.presets import OF_TOOLS, SECRETS, without
from trioserve.ray.guest import Guest
from trioserve.ray.replicas import Address, keep_alive
from trioserve.router.child import HealthCheck, ModelChild
from trioserve.server.model_server import ModelServer

_log = logging.getLogger("ray.serve")

#: Fields that a process does not need, or that others must not see among its flags.
_HIDDEN = OF_TOOLS | SECRETS.keys() | {
    "api_keys", "keys_file", "api_key_weights", "api_key_priority", "log_file"
}  # fmt: skip

#: Seconds in which an ingress with a lease has to connect, and to say who it is.
_GREETING = 10.0

#: Seconds between the end of the process and that of the replica: the errors of its requests leave
#: in between.
_FAREWELL = 0.5

#: Seconds that a question about the process's cache may take.
_LOOK_TIMEOUT = 1.0

#: The process is watched as often as Serve asks.
_WATCH = HealthCheck(interval=2.0)


class _Ingress:
    """An ingress that has leases here."""

    def __init__(self) -> None:
        self.has_come, self.has_left = asyncio.Event(), asyncio.Event()


class Replica:
    """The deployment of one model. It ends with its process, and that ends with it.

    Args:
        host: where it takes connections; none: at the address of its machine.

    Raises:
        ModelLoadError: the model cannot be loaded.
    """

    _is_closed = True  # until there is a process

    async def __init__(self, config: Config, host: str | None = None) -> None:  # type: ignore[misc]
        logs.configure(config)
        self._config = config
        self._n_running = 0
        self._ingresses: defaultdict[str, _Ingress] = defaultdict(_Ingress)
        argv = argv_of_process(config)
        entry = ModelEntry(
            name=config.aliases[0] if config.aliases else "model",
            source=Source.PRESET,
            args=argv,
            path=None,
        )
        environ = environment_of_children(os.environ, config)
        self._child = ModelChild(entry.name, 0, entry=entry, watch=_WATCH, environ=environ)
        self._is_ready = asyncio.Event()
        self._address: Address = ("", host or _host(), 0, secrets.token_urlsafe())
        guest = Guest()
        await guest.begin()
        self._life = asyncio.create_task(guest.run(self._live))
        self._guest = guest
        ready = asyncio.create_task(self._is_ready.wait())
        try:
            await asyncio.wait([self._life, ready], return_when=asyncio.FIRST_COMPLETED)
            if not self._is_ready.is_set():
                await self._life
                raise ModelLoadError(self._child.last_words())
        except BaseException:
            self._life.cancel()
            await guest.end()
            raise
        finally:
            ready.cancel()
        self._is_closed = False
        self._watching = asyncio.create_task(self._end_with_child())

    async def _live(self) -> None:
        """Run the process, and pass on what ingresses send, until it has ended."""
        with tempfile.TemporaryDirectory(prefix="trioserve-") as folder:
            path = Path(folder, "model.sock")
            _, host, _, secret = self._address
            listeners = await trio.open_tcp_listeners(0, host=host)
            port = listeners[0].socket.getsockname()[1]
            self._address = (secrets.token_hex(8), host, port, secret)
            argv = [MODEL, f"{AT}{path}", *self._child.entry.args]
            async with (
                open_launcher(self._child.environ) as launcher,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(trio.serve_listeners, partial(self._pass_on, path), listeners)
                await self._child.run(launcher, argv, self._on_report)
                nursery.cancel_scope.cancel()

    def _on_report(self, report: Report | None) -> None:
        if isinstance(report, Ready):
            self._is_ready.set()

    # -- ingresses

    async def lease(self, hint: object, ingress: str) -> AsyncGenerator[Address, None]:
        """Lend the process to a request: gives where it is. The lease lasts until it is cancelled.

        Args:
            hint: for the router of requests, which chose this replica by it.
            ingress: whose end is the end of the request.
        """
        self._n_running += 1
        known = self._ingresses[ingress]
        try:
            yield self._address
            with suppress(TimeoutError):
                await asyncio.wait_for(known.has_come.wait(), _GREETING)
                await known.has_left.wait()
        finally:
            self._n_running -= 1

    async def _pass_on(self, path: Path, stream: trio.SocketStream) -> None:
        """Pass on the bytes between an ingress and the process, until either has left."""
        greeting = b""
        # Any program may connect, and leave at any moment: that ends this connection alone.
        with suppress(OSError, trio.BrokenResourceError):
            with trio.move_on_after(_GREETING):
                greeting = await _line(stream)
            secret, _, name = greeting.decode(errors="replace").partition(" ")
            if secrets.compare_digest(secret.encode(), self._address[-1].encode()):
                keep_alive(stream)
                await self._pass_on_for(name, path, stream)

    async def _pass_on_for(self, name: str, path: Path, stream: trio.SocketStream) -> None:
        known = self._ingresses[name]
        known.has_come.set()
        try:
            async with (
                await trio.open_unix_socket(path) as process,
                trio.open_nursery() as both,
            ):
                both.start_soon(_pump, process, stream, both.cancel_scope)
                both.start_soon(_pump, stream, process, both.cancel_scope)
        finally:
            if self._ingresses.get(name) is known:  # it may have come back meanwhile
                del self._ingresses[name]
            known.has_left.set()

    # -- called by Serve

    async def check_health(self) -> None:
        """Raise if the process has ended. One that hangs is killed by who watches it.

        Raises:
            ModelProcessError: how it has ended.
        """
        if self._life.done():
            raise ModelProcessError(self._child.last_words())

    async def record_routing_stats(self) -> dict[str, float]:
        """Tell the router of requests how full this replica is."""
        slots = self._config.parallel
        running = min(self._n_running, slots)
        stats: dict[str, float] = {
            "slots": slots,
            "running": running,
            "waiting": self._n_running - running,
        }
        with suppress(TrioServeError, TimeoutError):  # as in a long step
            async with asyncio.timeout(_LOOK_TIMEOUT):
                now = await self._guest.run(partial(ask, self._child.line, ModelServer.status))
            cells = now.counters
            stats["kv"] = cells.n_cells_running / cells.n_cells if cells.n_cells else 0.0
        return stats

    def __del__(self) -> Awaitable[None] | None:
        """Have the process finish and end, in what is returned, which Serve awaits.

        Serve calls this once no requests are left, or they have taken too long. When Python itself
        calls it, there is nothing left to do.
        """
        return None if self._is_closed else self.close()

    async def close(self) -> None:
        """Have the process finish and end."""
        self._is_closed = True
        self._watching.cancel()
        self._child.stop(self._config.drain_timeout)
        await self._life
        await self._guest.end()

    async def _end_with_child(self) -> None:
        """End this process when the other one has, so that Serve starts another replica."""
        await asyncio.wait([self._life])
        self._is_closed = True
        _log.error("the replica ends: %s", self._child.last_words())
        await asyncio.sleep(_FAREWELL)
        os._exit(1)


def _host() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


async def _line(stream: trio.SocketStream, most: int = 256) -> bytes:
    """Receive a line, and nothing of what follows."""
    line = b""
    while not line.endswith(b"\n") and len(line) < most:
        if not (data := await stream.receive_some(1)):
            break
        line += data
    return line.removesuffix(b"\n")


async def _pump(
    source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope
) -> None:
    with suppress(trio.BrokenResourceError):
        async for data in source:
            await target.send_all(data)
    scope.cancel()


def argv_of_process(config: Config) -> tuple[str, ...]:
    """The flags of a model's process. What others must not see goes into its environment instead.

    Tools run in the ingresses.
    """
    options = without(parse(argv_of(config), {}).options, _HIDDEN)
    words = tuple(word for given in options.values() for word in given)
    return words if config.model_named is not None else (*words, "--model", str(BUNDLED))
