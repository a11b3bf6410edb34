"""LoRA adapters that are loaded and unloaded while requests run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import trio

from trioserve.config import Config
from trioserve.engine import Engine
from trioserve.engine.adapters import AdapterTable
from trioserve.errors import (
    AdapterInUseError,
    InvalidRequestError,
    ModelLoadError,
    NotSupportedError,
    UnknownModelError,
)
from trioserve.log import get_logger
from trioserve.server.adapters import AdapterNames, AdapterScales
from trioserve.server.context import RequestContext
from trioserve.server.lifecycle.services import EngineServices

_log = get_logger("trioserve.server")

#: Adapters that are loaded at the same time.
MAX_ADAPTERS = 256

#: Names of adapters. A colon would stand for the model before it.
_NAME = re.compile(r"[\w.@+-][\w.@+/ -]{0,127}")


class LoadedAdapters(AdapterNames):
    """The adapters of a model in this process.

    It loads and unloads them while the model is in memory, one at a time.

    Args:
        services: gives the services of the loaded model. Raises as `scales`.
        use: keeps the model in memory for a request.
    """

    def __init__(
        self,
        config: Config,
        names: Callable[[], Sequence[str]],
        services: Callable[[], EngineServices],
        use: Callable[[RequestContext], AbstractAsyncContextManager[EngineServices]],
    ) -> None:
        super().__init__(config, names)
        self._names, self._services, self._use = names, services, use
        self._one = trio.Lock()

    @property
    def scales(self) -> AdapterScales:
        """See `AdapterNames`."""
        return self._services().adapters

    def _folder(self) -> str:
        """The folder of files to load. Raises NotSupportedError without `--lora-dir`."""
        if self._config.lora_dir is None:
            raise NotSupportedError(
                "This server does not load or unload adapters. Start it with `--lora-dir`"
            )
        return self._config.lora_dir

    async def load(self, name: str, path: str, context: RequestContext) -> None:
        """See `ModelServer.load_adapter`."""
        folder = self._folder()
        async with self._use(context) as services, self._one:
            if not _NAME.fullmatch(name):
                raise InvalidRequestError.at("lora_name", "must be a name, without a colon.")
            if name in self.paths or name in self._names():
                raise InvalidRequestError.at("lora_name", f"is {name!r}, which is loaded already.")
            if len(self.paths) >= MAX_ADAPTERS:
                raise InvalidRequestError.at(
                    "lora_name", f"would be one more than {MAX_ADAPTERS} adapters."
                )
            found = await trio.to_thread.run_sync(partial(_inside, Path(folder), path))
            try:
                await self._add(services, name, found)
            except ModelLoadError as error:
                raise InvalidRequestError.at(
                    "lora_path", f"cannot be used: {error.message}"
                ) from error
            self.paths[name] = str(found)

    async def _add(self, services: EngineServices, name: str, path: Path) -> None:
        table = _table(services)
        await trio.to_thread.run_sync(table.try_file, path)
        with trio.CancelScope(shield=True):  # it takes a step, and must be noted
            id_ = await services.dispatcher.call(partial(table.add, path))
            services.adapters.add(name, id_, table.infos[id_])
        _log.info("adapter loaded", name=name, path=str(path))

    async def unload(self, name: str, context: RequestContext) -> None:
        """See `ModelServer.unload_adapter`."""
        self._folder()
        async with self._use(context) as services, self._one:
            table = _table(services)
            if name in self._scales:
                raise InvalidRequestError.at("lora_name", "was loaded with the model, by --lora.")
            if name not in self.paths:
                raise UnknownModelError.at("lora_name", f"is {name!r:.200}, which is not loaded.")
            id_ = services.adapters.ids[name]
            with trio.CancelScope(shield=True):
                table.closed |= {id_}
                if not await services.dispatcher.call(partial(table.remove, id_)):
                    table.closed -= {id_}
                    raise AdapterInUseError.at("lora_name", "is in use by a request.")
                services.adapters.remove(name)
                del self.paths[name]
        _log.info("adapter unloaded", name=name)

    async def restore(self, services: EngineServices, scales: Mapping[str, float] | None) -> None:
        """Load the adapters that were loaded before the model was, and set the default scales.

        One that cannot be loaded any more is dropped, and logged. Without scales, it is the first
        time that the model is loaded, and there is nothing to do.
        """
        if scales is None:
            return
        async with self._one:
            for name, path in list(self.paths.items()):
                if name in services.adapters.ids:
                    continue
                try:
                    await self._add(services, name, Path(path))
                except ModelLoadError as error:
                    del self.paths[name]
                    _log.error("adapter cannot be loaded again", name=name, reason=error.message)
        ids = services.adapters.ids
        services.adapters.set({ids[name]: one for name, one in scales.items() if name in ids})


def _table(services: EngineServices) -> AdapterTable:
    assert isinstance(services.loop, Engine)
    return services.loop.adapter_table


def _inside(folder: Path, path: str) -> Path:
    """Find a file in a folder, also by a path within it. Links may not lead out of it.

    Raises:
        InvalidRequestError: it is not there.
    """
    try:
        base = folder.resolve(strict=True)
        found = (base / path).resolve(strict=True)
        is_file = found.is_relative_to(base) and found.is_file()
    except (OSError, RuntimeError, ValueError):  # a loop of links; a character that no path has
        is_file = False
    if not is_file:
        raise InvalidRequestError.at("lora_path", "is not the path of a file in --lora-dir.")
    return found
