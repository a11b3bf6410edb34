"""A router whose fleet is played by hand: its children are apps in this process."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import attrs
import httpx
import trio

from tests.support.clients import TIMEOUT
from tests.support.http_server import child_app, serving
from trioserve.api.router.service import RouterService
from trioserve.api.service import Service
from trioserve.app import create_router
from trioserve.concurrency import Feed
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ModelNotLoadedError, TrioServeError
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.catalog import find_exact, find_named
from trioserve.router.fleet import Fleet
from trioserve.router.forward import Kept
from trioserve.router.states import FleetEvent, ModelState, QueueStatus, Status
from trioserve.testing import ScriptedBackend


def entry(name: str, **fields: object) -> ModelEntry:
    given = {"source": Source.DIRECTORY, "args": ("--model", f"/{name}"), "path": Path(f"/{name}")}
    return ModelEntry(name=name, **given | fields)  # type: ignore[arg-type]


@attrs.define
class FakeCatalog:
    entries: Mapping[str, ModelEntry]

    def find(self, name: str | None) -> ModelEntry:
        return find_named(self.entries, name, ("case", "part"))

    def exact(self, name: str) -> ModelEntry:
        return find_exact(self.entries, name)


@attrs.frozen
class FakeChild:
    socket_path: Path
    kept: Kept
    ended: trio.Event


@attrs.define(eq=False)
class FakeFleet:
    """A fleet of models with the given sockets. Models without a socket are never loaded.

    A waiting request gets the `news`. A model in `failures` raises its exception instead of giving
    a child. All children share the event `ended`. `jobs` has the jobs of the router, and
    `on_usage` takes what keys use.
    """

    catalog: FakeCatalog
    sockets: dict[str, Path] = attrs.field(factory=dict)
    states: dict[str, ModelState] = attrs.field(factory=dict)
    failures: dict[str, Exception] = attrs.field(factory=dict)
    news: list[QueueStatus] = attrs.field(factory=list)
    changed: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    users: list[str] = attrs.field(factory=list)
    kept: defaultdict[str, Kept] = attrs.field(factory=lambda: defaultdict(Kept))
    calls: list[tuple[str, str]] = attrs.field(factory=list)
    subscribers: list[Feed[FleetEvent]] = attrs.field(factory=list)
    events: list[FleetEvent] = attrs.field(factory=list)
    jobs: Fleet | None = None
    on_usage: Callable[[str, list[dict[str, Any]]], None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def change(self) -> None:
        """Have those that wait look again."""
        self.changed.set()
        self.changed = trio.Event()

    @asynccontextmanager
    async def use(
        self,
        entry: ModelEntry,
        *,
        autoload: bool = True,
        on_wait: Callable[[QueueStatus], None] | None = None,
    ) -> AsyncIterator[FakeChild]:
        name = entry.name
        while name not in self.sockets:
            if not autoload:
                raise ModelNotLoadedError(f"The model {name!r} is not loaded.", param="model")
            if name in self.failures:
                raise self.failures[name]
            for each in self.news:
                assert on_wait is not None
                on_wait(each)
            await self.changed.wait()
        self.users.append(name)
        try:
            yield FakeChild(self.sockets[name], self.kept[name], self.ended)
        finally:
            self.users.remove(name)

    def is_ready(self, entry: ModelEntry) -> bool:
        return entry.name in self.sockets

    def state(self, name: str) -> ModelState:
        path = self.sockets.get(name)
        value = Status.UNLOADED if path is None else Status.LOADED
        default = ModelState(value=value, socket_path=path)
        return self.states.get(name, default)

    async def load(self, entry: ModelEntry) -> None:
        if entry.name in self.sockets:
            raise InvalidRequestError("model is already running")
        self.calls.append(("load", entry.name))

    async def unload(self, entry: ModelEntry) -> None:
        if entry.name not in self.sockets:
            raise InvalidRequestError("model is not running")
        self.calls.append(("unload", entry.name))

    async def reload(self) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("reload", "*"))

    async def drain(self) -> None:
        self.calls.append(("drain", "*"))

    def begin(
        self, job: Callable[[], Awaitable[None]], failed: Callable[[TrioServeError], object]
    ) -> None:
        assert self.jobs is not None
        self.jobs.begin(job, failed)

    def tell(self, event: FleetEvent) -> None:
        self.events.append(event)

    @contextmanager
    def subscribe(self) -> Iterator[Feed[FleetEvent]]:
        feed = Feed[FleetEvent]()
        self.subscribers.append(feed)
        yield feed
        self.subscribers.remove(feed)


@attrs.define
class Routed:
    """A router in a test: a client of it, its service, its fleet, and the services of children."""

    client: httpx.AsyncClient
    url: str
    service: RouterService
    fleet: FakeFleet
    children: dict[str, Service]


@asynccontextmanager
async def routed(
    backends: Mapping[str, ScriptedBackend | Path | None] | None = None,
    *,
    child: Mapping[str, object] | None = None,
    **config: object,
) -> AsyncIterator[Routed]:
    """Serve a router.

    Args:
        backends: the models: a scripted backend, a socket that is served elsewhere, or none for a
            model that is not loaded. The default is one scripted model.
        child: the configuration of the children.
        config: the configuration of the router.
    """
    backends = {"one": ScriptedBackend()} if backends is None else backends
    fleet = FakeFleet(FakeCatalog({name: entry(name) for name in backends}))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = {}
        for name, backend in backends.items():
            if isinstance(backend, ScriptedBackend):
                path = folder / f"{len(children)}.sock"
                settings = {"alias": name, **(child or {})}
                children[name] = await stack.enter_async_context(
                    child_app(path, backend, **settings)
                )
                fleet.sockets[name] = path
            elif backend is not None:
                fleet.sockets[name] = backend

        @asynccontextmanager
        async def open_fleet() -> AsyncIterator[FakeFleet]:
            try:
                yield fleet
            finally:
                for kept in fleet.kept.values():
                    kept.close()

        app = create_router(Config(**config), open_fleet)  # type: ignore[arg-type]
        url = await stack.enter_async_context(serving(app))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=TIMEOUT))
        service = app.extensions["trioserve"]
        await service.wait_loaded()
        yield Routed(client, url, service, fleet, children)
