"""`Models`: servers by name. A limited number have their models in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import trio
from trio_util import wait_any

from trioserve import llama
from trioserve.concurrency import EnteredOnce, alongside
from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.server.lifecycle.engine import Driver, Loader, in_thread
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.server.server import Server

#: States in which a server holds a place in memory, or waits for one.
_IN_MEMORY = (ServerState.LOADING, ServerState.READY)

#: Seconds between checks for idle servers.
_LOOK_AGAIN = 1.0


class Models(EnteredOnce, Mapping[str, Server]):
    """Several models in one program: ``async with Models({"small": "a.gguf"}) as models:``.

    ``models["small"]`` is a `Server` that begins asleep: the first request loads its model. At
    the limit, the least recently used server sleeps to make room, as soon as it is idle. Requests
    wait for that in order.

    Leaving closes all servers, as leaving each of them would.

    Args:
        models: what to load, by name: a configuration, or a value of its field `model`.
        max_loaded: how many models may be in memory at the same time; 0: any number.
        load: loads a model; see `Server`.
        drive: runs an engine; see `Server`.

    Raises:
        ConfigError: `max_loaded` is negative.
    """

    def __init__(
        self,
        models: Mapping[str, Config | str],
        *,
        max_loaded: int = 0,
        load: Loader = llama.load,
        drive: Driver = in_thread,
    ) -> None:
        if max_loaded < 0:
            raise ConfigError(f"max_loaded must be at least 0, not {max_loaded}")
        self._places = trio.CapacityLimiter(max_loaded or max(1, len(models)))
        self._servers = {
            name: Server(
                Config(model=config) if isinstance(config, str) else config,
                load=load,
                drive=drive,
                asleep=True,
                room=partial(self._room, name),
            )
            for name, config in models.items()
        }

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for server in self._servers.values():
                await stack.enter_async_context(server)
            yield

    @asynccontextmanager
    async def _room(self, name: str) -> AsyncIterator[None]:
        """Hold one of the places in memory. While it waits, idle servers are put to sleep."""
        has_place = False
        try:
            async with alongside(partial(self._make_room, name)):
                await self._places.acquire()
                has_place = True
            yield
        finally:
            if has_place:
                self._places.release()

    async def _make_room(self, name: str) -> None:
        """Put one server after another to sleep, until cancelled.

        A freed place may go to a server that has waited for longer.
        """
        while True:
            others = [server for other, server in self._servers.items() if other != name]
            loaded = [one for one in others if one.state in _IN_MEMORY]
            since = [(one.lifecycle.idle_since, one) for one in loaded]
            idle = [(at, one) for at, one in since if at is not None]
            oldest = [min(idle, key=lambda pair: pair[0])[1]] if idle else loaded
            with trio.move_on_after(_LOOK_AGAIN):
                await wait_any(trio.sleep_forever, *(server.sleep for server in oldest))
