"""`Upstreams`: the other servers whose models are offered here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Reply
from trioserve.api.base.routes import Route
from trioserve.api.router.exchange import ROUTES, Exchange, UpstreamServer, body_for, tokens_in
from trioserve.concurrency import EnteredOnce, all_of, alone, alongside, repeat
from trioserve.config import Config
from trioserve.errors import NotSupportedError, TrioServeError, UpstreamUnavailableError
from trioserve.fair_limiter import MAX_WAITING, FairLimiter
from trioserve.log import get_logger
from trioserve.models.catalog import Catalog, ModelEntry
from trioserve.models.catalog.upstreams import Upstream
from trioserve.remote.client import connected_to
from trioserve.router.states import ModelState, Status
from trioserve.server.keys import Keys
from trioserve.server.limits.rates import RateLimits
from trioserve.server.observers.observer import Observer

_log = get_logger("trioserve.router")

#: Seconds between two looks at what an upstream lists, and until the first is no longer waited for.
_LOOK_AGAIN, _FIRST_LOOK = 60.0, 3.0


class Upstreams(EnteredOnce):
    """The upstreams of a catalog, which are connected to for the length of a block.

    Args:
        catalog: has the upstreams, and gets the entries of their models.
        config: of the app.
        keys: of its clients.
        observers: get the events of requests.
    """

    def __init__(
        self, catalog: Catalog, config: Config, keys: Keys, observers: Sequence[Observer]
    ) -> None:
        self._catalog, self._config, self._keys = catalog, config, keys
        self._observers = observers
        self._servers: dict[str, UpstreamServer] = {}
        self._reloading = trio.Lock()
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        async with alongside() as self._nursery:
            await self.reload()
            yield

    async def reload(self) -> None:
        """Look again which upstreams and models there are."""
        async with self._reloading:
            wanted = self._catalog.upstreams
            for name in self._servers.keys() - wanted.keys():
                self._servers.pop(name).retired.ring()
            self._offer()
            calls: list[Callable[[], Awaitable[None]]] = []
            for name, one in wanted.items():
                server = self._servers.get(name)
                if server is not None and server.upstream == one:
                    calls.append(partial(_glance, server))
                else:
                    calls.append(partial(self._begin, one))
            await all_of(calls)
            self._offer()

    async def _begin(self, upstream: Upstream) -> None:
        """Have an upstream from now on, in place of one that was configured otherwise."""
        begun = trio.Event()
        attend = partial(self._attend, upstream, begun)
        self._nursery.start_soon(alone, attend, partial(_note_failure, upstream))
        await begun.wait()

    async def _attend(self, upstream: Upstream, begun: trio.Event) -> None:
        """Have an upstream, until it is retired and its requests have ended."""
        timeouts = {"connect": upstream.connect_timeout, "read": upstream.timeout}
        places = FairLimiter(
            upstream.max_requests, max_waiting=self._config.max_queue or MAX_WAITING
        )
        try:
            async with connected_to(
                upstream.url, headers=upstream.headers, timeouts=timeouts, hint=""
            ) as client:
                client.name = f"The upstream {upstream.name!r}"
                server = UpstreamServer(upstream, client, places, upstream.models)
                await _glance(server)
                if (old := self._servers.get(upstream.name)) is not None:
                    old.retired.ring()
                self._servers[upstream.name] = server
                begun.set()
                async with alongside(partial(repeat, partial(self._watch, server))):
                    await server.retired.wait()
                await places.until_idle()
        finally:
            begun.set()

    async def _watch(self, server: UpstreamServer) -> None:
        await trio.sleep(_LOOK_AGAIN)
        await server.look()
        self._offer()

    def _offer(self) -> None:
        """Tell the catalog of all models. Of several with a name, the first one counts."""
        servers = [self._servers[name] for name in self._catalog.upstreams if name in self._servers]
        found = [entry for server in servers for entry in server.entries()]
        here = [one for one in self._catalog.entries.values() if one.upstream is None]
        known = {name for one in here for name in (one.name, *one.aliases)}
        self._catalog.offer({one.name: one for one in reversed(found) if one.name not in known})

    def _server_of(self, entry: ModelEntry) -> UpstreamServer:
        """The upstream of a model. Raises UpstreamUnavailableError: it is gone."""
        assert entry.upstream is not None
        if (server := self._servers.get(entry.upstream.name)) is None:
            raise UpstreamUnavailableError(f"The upstream {entry.upstream.name!r} is gone.")
        return server

    def state(self, entry: ModelEntry) -> ModelState:
        """The state of a model: that of its upstream."""
        server = self._server_of(entry)
        return ModelState(
            value=Status.UNLOADED if server.problem else Status.LOADED,
            failed=bool(server.problem),
            message=server.problem or None,
            n_requests=server.running[entry.name],
        )

    def n_ctx(self, entry: ModelEntry) -> int:
        """The context length of a model; 0: its upstream does not list it."""
        return self._server_of(entry).contexts.get(entry.remote_name, 0)

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        for server in list(self._servers.values()):
            await server.places.until_idle()

    async def answer(
        self, entry: ModelEntry, route: Route, incoming: Incoming, caller: Caller
    ) -> Reply:
        """Pass a request on, and give the answer.

        Raises:
            NotSupportedError: the upstream does not have the route.
            RateLimitError: the client has used up its requests or tokens of this minute.
            QueueFullError: too many requests of the client wait.
            UpstreamUnavailableError: the upstream cannot be reached.
            UpstreamError: it answers nonsense, or refuses its API key.
            TrioServeError: it refuses the request.
        """
        server, config = self._server_of(entry), self._config
        api, path = ROUTES.get(route.path, (None, ""))
        if api is None or api not in server.upstream.apis:
            raise not_there(entry, route.path)
        body, hides_usage = body_for(await incoming.fields(), api, entry.remote_name)
        caller.held.grow(incoming.size)  # it is written again
        limits = server.limits.get(entry.name)
        if limits is None:
            limits = server.limits[entry.name] = RateLimits(
                config.rate_limit_requests, config.rate_limit_tokens, self._keys
            )
        client = caller.api_key or caller.address
        caller.limits_left = partial(limits.remaining, client)
        limits.admit(client)
        n_asked = tokens_in(incoming.size)
        exchange = Exchange(
            server=server,
            name=entry.name,
            api=api,
            path=path,
            body=body,
            n_asked=n_asked,
            hides_usage=hides_usage,
            caller=caller,
            config=config,
            settle=limits.reserve(client, n_asked),
        )
        await caller.open(alongside(partial(exchange.run, self._observers)))
        return await anext(exchange.replies)


async def _glance(server: UpstreamServer) -> None:
    """Look at an upstream, if it answers soon."""
    with trio.move_on_after(_FIRST_LOOK):
        await server.look()


def _note_failure(upstream: Upstream, error: TrioServeError) -> None:
    _log.error("an upstream cannot be used", upstream=upstream.name, problem=error.message)


def not_there(entry: ModelEntry, path: str) -> NotSupportedError:
    """The error of a route that the upstream of a model does not have."""
    assert entry.upstream is not None
    return NotSupportedError(
        f"The model {entry.name!r} is at the upstream {entry.upstream.name!r}, which takes "
        f"requests of {', '.join(entry.upstream.apis)}, and not those of {path}."
    )
