"""LoRA adapters of a server: their names and default scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from trioserve.config import Config
from trioserve.config.readers import parse_adapter, unicode_name
from trioserve.errors import InvalidRequestError, UnknownModelError
from trioserve.types import AdapterInfo, Adapters


def names_of(paths: Iterable[str]) -> list[str]:
    """Name adapters by their files; the second file of a name has a number."""
    names: list[str] = []
    for path in paths:
        stem, n = unicode_name(Path(path).stem), 1
        name = stem
        while name in names:
            n += 1
            name = f"{stem}-{n}"
        names.append(name)
    return names


class AdapterScales:
    """The adapters of a loaded model, and their default scales. Used on the event loop."""

    def __init__(self, infos: Sequence[AdapterInfo]) -> None:
        #: All adapters that were ever loaded, by their ids.
        self.infos = list(infos)
        #: The names of all, by their ids.
        self.names = names_of(one.path for one in infos)
        #: The ids of those that are loaded, by name.
        self.ids = {name: id_ for id_, name in enumerate(self.names)}
        self._scales = [info.scale for info in infos]

    @classmethod
    def of(
        cls,
        infos: Sequence[AdapterInfo],
        names: Sequence[str],
        ids: Mapping[str, int],
        scales: Sequence[float],
    ) -> Self:
        """Copy those of another process."""
        made = cls(infos)
        made.names, made.ids, made._scales = list(names), dict(ids), list(scales)
        return made

    @property
    def scales(self) -> tuple[float, ...]:
        """The default scale of each adapter."""
        return tuple(self._scales)

    @property
    def by_name(self) -> dict[str, float]:
        """The default scales of the loaded ones, by name."""
        return {name: self._scales[id_] for name, id_ in self.ids.items()}

    @property
    def current(self) -> Adapters:
        """The adapters with their default scales."""
        return _in_use(enumerate(self._scales))

    def set(self, scales: Mapping[int, float]) -> None:
        """Change the default scales for later requests; an adapter that is not named gets 0.

        Raises:
            InvalidRequestError: an adapter does not exist; nothing has changed.
        """
        self._check(scales)
        self._scales = [scales.get(id_, 0.0) for id_ in range(len(self.infos))]

    def choose(self, given: Sequence[tuple[int, float]]) -> Adapters:
        """The adapters for a request with these ids and scales; the default ones if it has none.

        Raises:
            InvalidRequestError: an adapter does not exist.
        """
        if not given:
            return self.current
        scales = dict(given)
        self._check(scales)
        return _in_use(sorted(scales.items()))

    def id_of(self, name: str) -> int:
        """The id of a loaded adapter. Raises UnknownModelError."""
        if name not in self.ids:
            raise UnknownModelError.at("model", f"names the adapter {name!r}, which is unloaded.")
        return self.ids[name]

    def add(self, name: str, id_: int, info: AdapterInfo) -> None:
        """Note an adapter that was loaded. By default, requests do without it."""
        assert id_ == len(self.infos)
        self.infos.append(info)
        self.names.append(name)
        self._scales.append(0.0)
        self.ids[name] = id_

    def remove(self, name: str) -> None:
        """Forget an adapter. Its id is not used again: caches know it."""
        id_ = self.ids.pop(name)
        self._scales[id_] = 0.0

    def _check(self, ids: Iterable[int]) -> None:
        loaded = self.ids.values()
        for id_ in ids:
            if id_ not in loaded:
                n = len(self.infos)
                known = f"ids run from 0 to {n - 1}" if n else "the server was started without"
                if 0 <= id_ < n:
                    known = "it was unloaded"
                raise InvalidRequestError(f"There is no LoRA adapter {id_}: {known}.", param="lora")


def _in_use(scales: Iterable[tuple[int, float]]) -> Adapters:
    return tuple((id_, float(scale)) for id_, scale in scales if scale)


class AdapterNames(ABC):
    """The adapters that requests can name, also while the model sleeps. Used on the event loop.

    Args:
        config: of the model.
        names: gives the model's names. Raises ServerSleepingError: they are not known yet.

    Attributes:
        possible: whether there may be any.
    """

    def __init__(self, config: Config, names: Callable[[], Sequence[str]]) -> None:
        self._config, self._bases = config, names
        self.possible = bool(config.lora or config.lora_dir)
        given = list(map(parse_adapter, config.lora))
        found = names_of(path for path, _ in given)
        self._paths = {name: path for name, (path, _) in zip(found, given, strict=True)}
        self._scales = {name: scale for name, (_, scale) in zip(found, given, strict=True)}

    @property
    def paths(self) -> dict[str, str]:
        """The files of all adapters, by name."""
        return self._paths

    def named(self, model: str | None) -> str | None:
        """Find the adapter that a name of a model means; None: it means the model without one.

        That is its own name, or one of the model's, a colon, and its own.

        Raises:
            UnknownModelError: there is no such adapter.
            ServerSleepingError: the server started asleep and has not loaded the model yet.
        """
        bases = self._bases()
        model = (model or "").removesuffix(":latest")  # of Ollama's clients
        if not model or model in bases or not self.possible:
            return None
        if model in self.paths:
            return model
        base, _, name = model.rpartition(":")
        if base in bases and name in self.paths:
            return name
        if base in bases or self._config.lora_dir:
            known = ", ".join([bases[0], *self.paths])
            raise UnknownModelError.at("model", f"is {model!r:.200}; there are {known:.2000}.")
        return None

    @property
    @abstractmethod
    def scales(self) -> AdapterScales:
        """The adapters of the loaded model, and their default scales.

        Raises:
            ServerSleepingError: the server sleeps.
            ServerClosingError: it is closed.
        """

    def choose(self, name: str) -> Adapters:
        """The adapter of a name and no other. Raises as `scales`, and UnknownModelError if it was
        unloaded.
        """
        return ((self.scales.id_of(name), self._scales.get(name) or 1.0),)
