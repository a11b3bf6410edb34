"""Replicas of Ray without Ray: servers in this process that an ingress connects to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import trio

from tests.support.scripted_server import serve
from trioserve.api import App
from trioserve.api.base import vendors
from trioserve.app import app_of
from trioserve.children.frames import receive
from trioserve.children.parent import ParentSocket
from trioserve.cli.model_process import answer_other, process_of
from trioserve.config import Config
from trioserve.ray import prefix_affinity
from trioserve.ray.guest import Guest
from trioserve.ray.ingress import Ingress, Peers
from trioserve.ray.prefix_affinity import RoutingHint
from trioserve.ray.replicas import Address, ModelTarget, Replicas as LentReplicas
from trioserve.ray.service import RayState
from trioserve.server.server import Server
from trioserve.testing import ScriptedBackend


class LostError(Exception):
    """Ray's error when a replica has died."""


class AbsentError(LostError):
    """Ray's error when there will be no replica."""


@attrs.define(eq=False)
class FakeReplica:
    """A replica with a server in this process, until it dies."""

    name: str
    server: Server
    address: Address = ("", "", 0, "")
    greetings: list[bytes] = attrs.field(factory=list)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Serve. Runs on Trio."""
        ours, theirs = socket.socketpair()
        process = process_of(self.server, ParentSocket(ours))
        with self._scope, ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = (self.name, "127.0.0.1", listener.getsockname()[1], "secret")
            async with self.server, trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    connection, _ = listener.accept()
                    self.greetings.append(await receive(connection))
                    nursery.start_soon(answer_other, process, connection)

    def die(self) -> None:
        """End its connections."""
        self._scope.cancel()


#: The outcome of a call: the lease of a replica, an error, or no answer (None).
Play: TypeAlias = FakeReplica | Exception | None


class Response:
    """A call's answer. `cancelled` is whether it was ended."""

    def __init__(self, play: Play) -> None:
        self.cancelled = False
        self._play = play

    async def __anext__(self) -> Address:
        if isinstance(self._play, Exception):
            raise self._play
        if self._play is None:
            await asyncio.Event().wait()
        assert isinstance(self._play, FakeReplica)
        return self._play.address

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """The replicas of a model: each call is played by the next of `plays`, and then by the last.

    A call whose key is the name of a replica goes to that.
    """

    def __init__(self, *plays: ScriptedBackend | Exception | None, **config: Any) -> None:
        self.plays: list[Play] = [
            FakeReplica(f"r{n}", serve(one, **config)) if isinstance(one, ScriptedBackend) else one
            for n, one in enumerate(plays, 1)
        ]
        self.running = [one for one in self.plays if isinstance(one, FakeReplica)]
        self.hints: list[RoutingHint] = []
        self.responses: list[Response] = []
        self.names = [one.name for one in self.running]

    def call(self, hint: RoutingHint, ingress: str) -> Response:
        named = [one for one in self.running if one.name == hint.key]
        play = named[0] if named else self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        self.hints.append(hint)
        self.responses.append(Response(play))
        return self.responses[-1]


@asynccontextmanager
async def ingress_of(
    models: Mapping[str, Replicas],
    config: Config | None = None,
    *,
    several: Sequence[str] = (),
    patience: float = 30.0,
    peers: Peers | None = None,
    is_single: bool = True,
) -> AsyncIterator[Ingress]:
    """Run the ingress of models. Those in `several` have more than one replica."""
    config = config or Config()
    targets = [
        ModelTarget(
            name=name,
            aliases=(f"{name}-alias",),
            config=Config(metrics_endpoint=config.metrics_endpoint),
            is_single=name not in several,
            call=replicas.call,
            lost=(LostError,),
            absent=(AbsentError,),
            replicas=lambda replicas=replicas: replicas.names,  # type: ignore[misc]
        )
        for name, replicas in models.items()
    ]

    def make(guest: Guest) -> App:
        state = RayState(config, LentReplicas(guest, "me", targets, patience=patience))
        state.streams.owner = "me."
        app = app_of(state)

        @app.before_serving
        async def start() -> None:
            for replicas in models.values():
                for one in replicas.running:
                    await app.nursery.start(one.run)
            await state.wait_loaded()

        @app.after_serving
        async def end() -> None:
            for replicas in models.values():
                for one in replicas.running:
                    one.die()

        return app

    ingress = Ingress(make, peers, config.max_body_size, is_single=is_single)
    given: asyncio.Queue[Any] = asyncio.Queue()
    told: asyncio.Queue[Any] = asyncio.Queue()
    scope: Any = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    life = asyncio.create_task(ingress(scope, given.get, told.put))
    given.put_nowait({"type": "lifespan.startup"})
    assert (await told.get())["type"] == "lifespan.startup.complete"
    try:
        yield ingress
    finally:
        given.put_nowait({"type": "lifespan.shutdown"})
        await life


@attrs.frozen
class Received:
    """The bytes that a client has received."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Ingress,
    method: str,
    target: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    root_path: str = "",
    comes: bool = True,
    began: asyncio.Event | None = None,
) -> Received:
    """Send a request, and receive the whole answer. The body may stay away.

    `began` is set once the answer has begun.
    """
    path, _, query = target.partition("?")
    sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    size = {"content-length": str(len(sent))} if sent else {}
    given = {"host": "localhost", "content-type": "application/json", **size, **(headers or {})}
    scope: Any = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": root_path + path,
        "raw_path": (root_path + path).encode(),
        "root_path": root_path,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), text.encode()) for name, text in given.items()],
        "client": ("192.0.2.1", 1234),
        "server": ("127.0.0.1", 8000),
    }
    messages = [{"type": "http.request", "body": sent, "more_body": False}] if comes else []
    received: list[Any] = []

    async def take() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Any) -> None:
        received.append(message)
        if began is not None and len(received) == 2:
            began.set()

    await app(scope, take, send)
    start, *pieces = received
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    names = [(name.decode().lower(), text.decode()) for name, text in start["headers"]]
    return Received(start["status"], dict(names), b"".join(piece["body"] for piece in pieces))


def hint_of(route: str, body: object, key: str | None = None) -> RoutingHint:
    """The hint for a request to this route."""
    path = route.partition("?")[0]
    known = {each.path: each for each in vendors.known_routes() if each.method == "POST"}
    fields = known[path].prompt_fields if path in known else None
    return prefix_affinity.hint_of(body, fields, key)
