"""`ChildModels`: models by name for a program, each in a separate process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.concurrency import EnteredOnce
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.model_process.connection import Known, OpenCall
from trioserve.model_process.server import ChildServer
from trioserve.models.catalog import Catalog, ModelEntry, with_tools_of
from trioserve.router.fleet import Fleet
from trioserve.router.states import QueueStatus
from trioserve.server.limits.memory import MemoryBudget
from trioserve.tools.registry import ToolRegistry, open_registry


@attrs.frozen
class PlacedLine:
    """Leads to the process of a model, which is started when it is needed."""

    fleet: Fleet
    entry: ModelEntry
    #: Called with where a call stands that waits, and with None when it does not.
    on_wait: Callable[[QueueStatus | None], None] = lambda _status: None

    @property
    def known(self) -> Known:
        """The known properties of the model."""
        return self.fleet.known(self.entry.name)

    @asynccontextmanager
    async def open(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> AsyncIterator[OpenCall]:
        """See `Line.open`. Raises as `Fleet.use`, too."""
        async with (
            self.fleet.use(self.entry, on_wait=self.on_wait) as child,
            child.line.open(method, *args, **kwargs) as call,
        ):
            self.on_wait(None)
            yield call


def child_server(
    line: PlacedLine, client: str = "", tools: ToolRegistry | None = None, own: Config | None = None
) -> ChildServer:
    """Make the server of a model of a fleet, for a program; see `ChildServer`.

    `own` is the configuration of the `tools`.
    """
    config = parse(line.entry.args, line.fleet.catalog.environment).config
    config = with_tools_of(config, own or Config())
    memory, tools = MemoryBudget.of(config), tools or ToolRegistry()
    return ChildServer(line, config, tools=tools, memory=memory, client=client)


class ChildModels(EnteredOnce, Mapping[str, ChildServer]):
    """Models in separate processes: ``async with ChildModels(models_dir="m") as models:``.

    The models are those that ``trioserve --models-dir m`` offers, under the same names, and
    ``models[name]`` has the methods of a `Server`. Its process is started when it is first needed,
    and stopped when other models need the room, but never while a request uses it. A crash ends
    only the requests of that process. Tools run in this process.

    Leaving ends the processes and the requests that still run.

    Args:
        models_dir: a directory of GGUF files.
        models_preset: an INI file with flags for each model.
        flags: flags of the command line, for all models, and of the tools that runs may use.
        max_loaded: how many processes may run at the same time; 0: any number.
        max_memory: bytes that they may need together, by llama.cpp's estimate; 0: any number.

    Raises:
        ConfigError: on entry, when a directory, the presets or a flag cannot be used.
    """

    def __init__(
        self,
        models_dir: str | Path | None = None,
        *,
        models_preset: str | Path | None = None,
        flags: Sequence[str] = (),
        max_loaded: int = 4,
        max_memory: int = 0,
    ) -> None:
        config = Config(
            models_dir=None if models_dir is None else str(models_dir),
            models_preset=None if models_preset is None else str(models_preset),
        )
        self._find = partial(Catalog, config, flags)
        self._open = partial(Fleet, max_models=max_loaded, max_memory=max_memory)
        self._parse = partial(parse, flags, os.environ)
        self._fleet: Fleet | None = None
        self._own, self._tools = Config(), ToolRegistry()

    def __getitem__(self, name: str) -> ChildServer:
        line = PlacedLine(self._entered, self._entered.catalog.entries[name])
        return child_server(line, tools=self._tools, own=self._own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entered.catalog.entries)

    def __len__(self) -> int:
        return len(self._entered.catalog.entries)

    @property
    def _entered(self) -> Fleet:
        if self._fleet is None:
            raise RuntimeError("the models are known inside the block")
        return self._fleet

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        catalog = await trio.to_thread.run_sync(self._find)
        self._own = self._parse().config
        async with open_registry(self._own) as self._tools, self._open(catalog) as self._fleet:
            await self._tools.listed()
            yield
