"""The replicas of models, as an ingress sees them: each is lent for a request, with its connection.

A lease is a call through Serve's router, which chooses the replica and counts the call as long as
it lasts. The request itself goes over a connection that the ingress has to each replica, whose
frames are those of a model's process. Only plain values go through Serve, because it pickles them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import attrs
import trio

from trioserve.children.frames import FrameError, send
from trioserve.children.reports import Report, Usage
from trioserve.config import Config
from trioserve.errors import ModelFailedError, ModelProcessError, TrioServeError, UnknownModelError
from trioserve.log import get_logger
from trioserve.model_process.connection import Connection, converse
from trioserve.model_process.messages import Introduced
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.catalog import find_named
from trioserve.ray.guest import Guest
from trioserve.ray.prefix_affinity import RoutingHint
from trioserve.server.model import LoadedModel

_log = get_logger("trioserve.ray")

#: The address of a replica: its name, its host and port, and the secret that opens it.
Address: TypeAlias = tuple[str, str, int, str]

#: The routers of requests in this process, by the names of their deployments. Serve pickles their
#: module by value, so it must reach this through another: a global variable there would be a copy.
routers: WeakValueDictionary[str, Any] = WeakValueDictionary()

#: Seconds until a replica is asked for again, and in which one has to take a connection.
_PAUSE, _CONNECT_TIMEOUT = 0.1, 5.0

#: Seconds after which a client may try again when no replica is there.
_RETRY_AFTER = 5.0

#: A machine that is gone does not answer: seconds of silence until it is asked, and between two
#: questions, and how many may stay without an answer.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def replicas_of(deployment: str) -> list[str]:
    """The names of a deployment's replicas that a router in this process has seen.

    A router is made when the deployment is first called.
    """
    router = routers.get(deployment)
    return [] if router is None else sorted(one.unique_id for one in router.curr_replicas)


def keep_alive(stream: trio.SocketStream | socket.socket) -> None:
    """Have a connection break when the machine at its other end is lost."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)


class NoReplicaError(ModelFailedError):
    """No replica of the model takes requests."""

    code = "no_replica"


class NoSuchModelError(UnknownModelError):
    """There is no model of the name in the request, and none may be loaded."""

    status = 404


class Response(Protocol):
    """A call, as Serve's handle gives it."""

    async def __anext__(self) -> Any:
        """Wait for what comes next."""

    def cancel(self) -> None:
        """End the call. Does nothing once it has ended."""


@attrs.frozen(kw_only=True)
class ModelTarget:
    """A model, as an ingress knows it, and the exceptions of Ray that a call of it may raise."""

    name: str
    aliases: tuple[str, ...] = ()
    config: Config  # of its servers
    is_single: bool  # whether it never has more than one replica
    #: Takes a lease of the replica that Serve's router chooses, for the ingress of a name.
    call: Callable[[RoutingHint, str], Response]
    lost: tuple[type[Exception], ...]  # the exceptions when the replica is lost
    absent: tuple[type[Exception], ...]  # those when there will be none
    #: Gives the names of the replicas, as far as they are known.
    replicas: Callable[[], Sequence[str]]


@attrs.define(eq=False)
class _Peer:
    """A replica that this ingress is connected to, or will be."""

    line: Connection = attrs.field(factory=Connection)
    known: trio.Event = attrs.field(factory=trio.Event)  # what its model is, or that it has ended
    has_ended: bool = False


class Replicas:
    """The replicas of all models of an application.

    Args:
        patience: seconds that a request waits for a replica to take it.
    """

    def __init__(
        self, guest: Guest, ingress: str, targets: Sequence[ModelTarget], *, patience: float
    ) -> None:
        self.targets: Mapping[str, ModelTarget] = {one.name: one for one in targets}
        #: Called with what API keys use of a model.
        self.on_usage: Callable[[str, Any], None] = lambda *_: None
        self.ingress, self._guest, self._patience = ingress, guest, patience
        self._peers: dict[Address, _Peer] = {}
        self._nursery: trio.Nursery
        self._entries = {
            one.name: ModelEntry(
                name=one.name, source=Source.PRESET, args=(), path=None, aliases=one.aliases
            )
            for one in targets
        }

    def __iter__(self) -> Iterator[ModelTarget]:
        return iter(self.targets.values())

    def find(self, name: str | None, config: Config) -> ModelTarget:
        """Find a model. With one model, its name does not matter.

        Raises:
            NoSuchModelError: no model has the name.
            AmbiguousModelError: the name may mean several.
        """
        if len(self.targets) == 1:
            return next(iter(self))
        match, default = config.models_match, config.models_default
        try:
            return self.targets[find_named(self._entries, name, match, default).name]
        except UnknownModelError as error:
            raise NoSuchModelError(error.message, param="model") from None

    async def run(self) -> None:
        """Keep the connections, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    @asynccontextmanager
    async def lease(
        self, target: ModelTarget, hint: RoutingHint, patience: float | None = None
    ) -> AsyncIterator[Connection]:
        """Have a replica for the length of a block.

        Raises:
            NoReplicaError: none has.
        """
        none = NoReplicaError(
            f"No replica of the model {target.name!r} takes requests now.",
            retry_after=_RETRY_AFTER,
        )
        found = None
        with trio.move_on_after(self._patience if patience is None else patience):
            found = await self._until_granted(target, hint)
        if found is None:
            raise none
        response, line = found
        try:
            yield line
        finally:
            response.cancel()

    async def _until_granted(
        self, target: ModelTarget, hint: RoutingHint
    ) -> tuple[Response, Connection] | None:
        """Take a lease, of another replica if one is lost. None: there will be none."""
        while True:
            try:
                return await self._granted(target, hint)
            except ModelProcessError as error:
                _log.warning("a replica is lost", model=target.name, why=repr(error.__cause__))
                if isinstance(error.__cause__, target.absent):
                    return None
            await trio.sleep(_PAUSE)

    async def _granted(self, target: ModelTarget, hint: RoutingHint) -> tuple[Response, Connection]:
        """Take a lease. Raises ModelProcessError: the replica is lost; its cause says how."""
        response, address = await self._guest.ask_host(partial(self._take, target, hint))
        try:
            return response, await self._line_to(target, address)
        except BaseException:
            response.cancel()
            raise

    async def _take(self, target: ModelTarget, hint: RoutingHint) -> tuple[Response, Address]:
        response = target.call(hint, self.ingress)
        try:
            return response, await response.__anext__()
        except StopAsyncIteration as error:
            raise ModelProcessError from error
        except target.lost as error:
            response.cancel()
            raise ModelProcessError from error
        except asyncio.CancelledError as error:
            response.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ModelProcessError from error  # the replica was, not we

    async def _line_to(self, target: ModelTarget, address: Address) -> Connection:
        """The connection to a replica. Raises ModelProcessError: it takes none."""
        if (peer := self._peers.get(address)) is None:
            peer = self._peers[address] = _Peer()
            self._nursery.start_soon(self._attend, target, address, peer)
        await peer.known.wait()
        if peer.has_ended:
            raise ModelProcessError
        return peer.line

    async def _attend(self, target: ModelTarget, address: Address, peer: _Peer) -> None:
        """Stay connected to a replica until it ends."""
        _, host, port, secret = address

        def learn(introduced: Introduced) -> LoadedModel:
            return introduced.learn(target.config)

        def told(report: Report) -> None:
            peer.known.set()  # the state follows what the model is
            if isinstance(report, Usage):
                self.on_usage(target.name, report.rows)

        try:
            connect = partial(socket.create_connection, (host, port), _CONNECT_TIMEOUT)
            with await trio.to_thread.run_sync(connect) as connection:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(connection)
                await send(connection, f"{secret} {self.ingress}\n".encode())
                await converse(peer.line, connection, learn, told)
        except OSError as error:
            _log.warning("a replica cannot be reached", model=target.name, why=str(error))
        except (FrameError, TrioServeError) as error:
            _log.error("a replica says what cannot be", model=target.name, why=str(error))
        finally:
            del self._peers[address]
            peer.has_ended = True
            peer.known.set()
