"""A router whose fleet is played by hand: its processes are such in name only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import attrs
import httpx
import trio

from tests.support.clients import TIMEOUT
from tests.support.http_server import serving
from tests.support.model_processes import InName, child_of
from trioserve.api.router.service import RouterService
from trioserve.app import create_router
from trioserve.concurrency import Feed
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ModelNotLoadedError, TrioServeError
from trioserve.model_process.connection import Known
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.catalog import find_exact, find_named
from trioserve.models.catalog.upstreams import Upstream
from trioserve.router.child import ModelChild
from trioserve.router.fleet import Fleet
from trioserve.router.states import FleetEvent, ModelState, QueueStatus, Status
from trioserve.testing import ScriptedBackend, scripted


def entry(name: str, **fields: object) -> ModelEntry:
    given = {"source": Source.DIRECTORY, "args": ("--model", f"/{name}"), "path": Path(f"/{name}")}
    return ModelEntry(name=name, **given | fields)  # type: ignore[arg-type]


@attrs.define
class FakeCatalog:
    entries: Mapping[str, ModelEntry]
    environment: Mapping[str, str] = attrs.field(factory=dict)
    upstreams: Mapping[str, Upstream] = attrs.field(factory=dict)

    def offer(self, entries: Mapping[str, ModelEntry]) -> None:
        here = {name: one for name, one in self.entries.items() if one.upstream is None}
        self.entries = {**here, **entries}

    def find(self, name: str | None, default: ModelEntry | None = None) -> ModelEntry:
        answers = None if default is None else default.name
        return find_named(self.entries, name, ("case", "part"), answers)

    def exact(self, name: str) -> ModelEntry:
        return find_exact(self.entries, name)


@attrs.define(eq=False)
class FakeFleet:
    """A fleet of models with the given processes. Models without one are never loaded.

    A waiting request gets the `news`. A model in `failures` raises its exception instead of giving
    a process. `jobs` has the jobs of the router, and `on_usage` takes what keys use.
    """

    catalog: FakeCatalog
    children: dict[str, ModelChild] = attrs.field(factory=dict)
    states: dict[str, ModelState] = attrs.field(factory=dict)
    failures: dict[str, Exception] = attrs.field(factory=dict)
    news: list[QueueStatus] = attrs.field(factory=list)
    changed: trio.Event = attrs.field(factory=trio.Event)
    users: list[str] = attrs.field(factory=list)
    calls: list[tuple[str, str]] = attrs.field(factory=list)
    events: FakeEvents = attrs.field(factory=lambda: FakeEvents())
    jobs: Fleet | None = None
    on_usage: Callable[[str, Any], None] = lambda *_: None

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
    ) -> AsyncIterator[ModelChild]:
        name = entry.name
        while name not in self.children:
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
            yield self.children[name]
        finally:
            self.users.remove(name)

    def is_ready(self, entry: ModelEntry) -> bool:
        return entry.name in self.children

    def state(self, name: str) -> ModelState:
        value = Status.LOADED if name in self.children else Status.UNLOADED
        return self.states.get(name, ModelState(value=value))

    def child(self, name: str) -> ModelChild | None:
        return self.children.get(name)

    def known(self, name: str) -> Known:
        return self.children[name].line.known if name in self.children else Known()

    def loaded(self) -> dict[str, ModelChild]:
        return self.children

    async def load(self, entry: ModelEntry, args: tuple[str, ...] = ()) -> None:
        if entry.name in self.children:
            raise InvalidRequestError("model is already running")
        self.calls.append((" ".join(("load", *args)), entry.name))

    async def unload(self, entry: ModelEntry) -> None:
        if entry.name not in self.children:
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


@attrs.define
class FakeEvents:
    """The published events, and the feeds of subscribers, which a test fills."""

    told: list[FleetEvent] = attrs.field(factory=list)
    subscribers: list[Feed[FleetEvent]] = attrs.field(factory=list)

    def tell(self, event: FleetEvent) -> None:
        self.told.append(event)

    @contextmanager
    def subscribe(self) -> Iterator[Feed[FleetEvent]]:
        feed = Feed[FleetEvent]()
        self.subscribers.append(feed)
        yield feed
        self.subscribers.remove(feed)


@attrs.define
class Routed:
    """A router in a test: a client of it, its service, its fleet, and the processes of models."""

    client: httpx.AsyncClient
    url: str
    service: RouterService
    fleet: FakeFleet
    processes: dict[str, InName]
    _start: Callable[..., Awaitable[tuple[ModelChild, InName]]]

    async def load(self, name: str, backend: ScriptedBackend, *, silent: bool = False) -> None:
        """Load a model, or replace its process, and have those that wait look."""
        child, self.processes[name] = await self._start(name, backend, silent=silent)
        self.fleet.children[name] = child
        self.fleet.change()


@asynccontextmanager
async def routed(
    backends: Mapping[str, ScriptedBackend | None] | None = None,
    *,
    child: Mapping[str, object] | None = None,
    silent: Container[str] = (),
    upstreams: Mapping[str, Upstream] | None = None,
    **config: object,
) -> AsyncIterator[Routed]:
    """Serve a router.

    Args:
        backends: the models: a scripted backend, or none for a model that is not loaded. The
            default is one scripted model.
        child: the configuration of the processes.
        silent: models whose processes do not answer.
        upstreams: other servers.
        config: the configuration of the router.
    """
    backends = {"one": ScriptedBackend()} if backends is None else backends
    catalog = FakeCatalog({name: entry(name) for name in backends}, upstreams=upstreams or {})
    fleet = FakeFleet(catalog)

    async def start(
        name: str, backend: ScriptedBackend, *, silent: bool = False
    ) -> tuple[ModelChild, InName]:
        settings = Config(**{"alias": name, "stream_interval_ms": 0, **(child or {})})  # type: ignore[arg-type]

        def on_usage(model: str, rows: Any) -> None:
            fleet.on_usage(model, rows)

        load = scripted(backend)
        return await child_of(nursery, load, settings, name, silent=silent, on_usage=on_usage)

    async with trio.open_nursery() as nursery:

        @asynccontextmanager
        async def open_fleet() -> AsyncIterator[FakeFleet]:
            yield fleet

        app = create_router(Config(**config), open_fleet)  # type: ignore[arg-type]
        async with (
            serving(app) as url,
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client,
        ):
            service = app.extensions["trioserve"]
            await service.wait_loaded()
            router = Routed(client, url, service, fleet, {}, start)
            for name, backend in backends.items():
                if backend is not None:
                    await router.load(name, backend, silent=name in silent)
            yield router
        nursery.cancel_scope.cancel()
