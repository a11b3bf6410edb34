"""The LoRA adapters of an engine, which come and go while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from trioserve.errors import InvalidRequestError
from trioserve.types import AdapterInfo, Adapters


class AdapterBackend(Protocol):
    """The part of a backend that loads, sets and frees LoRA adapters."""

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The LoRA adapters that were loaded. Their ids are their places.

        One that was removed keeps its place, and has no path.
        """

    def set_adapters(self, adapters: Adapters) -> None:
        """Use these LoRA adapters, and no others, from the next `decode` on.

        Raises DecodeError: it cannot.
        """

    def try_adapter(self, path: Path) -> None:
        """Try the file of a LoRA adapter, from any thread. Blocks.

        Raises ModelLoadError: it cannot be used.
        """

    def add_adapter(self, path: Path) -> int:
        """Load a LoRA adapter; returns its id. Raises ModelLoadError: it cannot be used."""

    def remove_adapter(self, id_: int) -> None:
        """Free a LoRA adapter that is not set."""


class AdapterTable:
    """Adds and removes LoRA adapters. Use `add` and `remove` through `EngineLoop.call`.

    Args:
        backend: has the adapters.
        used: the sets of adapters of all tasks that run or wait.
        expect: called when there may be tasks with adapters.
        unset: has the backend use none until the next batch.
    """

    def __init__(
        self,
        backend: AdapterBackend,
        used: Callable[[], Iterable[Adapters]],
        expect: Callable[[], None],
        unset: Callable[[], None],
    ) -> None:
        self._backend, self._used, self._expect, self._unset = backend, used, expect, unset
        #: As `Backend` has it; from any thread.
        self.try_file = backend.try_adapter
        #: Ids that no further task may have. The event loop's thread sets it.
        self.closed: frozenset[int] = frozenset()

    @property
    def infos(self) -> Sequence[AdapterInfo]:
        return self._backend.adapters

    def check(self, adapters: Adapters) -> None:
        """Check that a task can have adapters. Raises InvalidRequestError."""
        for id_, _ in adapters:
            if id_ >= len(self.infos) or id_ in self.closed:
                raise InvalidRequestError(f"There is no LoRA adapter {id_}.", param="lora")

    def add(self, path: Path) -> int:
        """Load an adapter; returns its id. Raises ModelLoadError if it cannot be used."""
        id_ = self._backend.add_adapter(path)
        self._expect()
        return id_

    def remove(self, id_: int) -> bool:
        """Free an adapter, unless a task runs or waits with it; returns whether it is freed.

        What the caches hold of texts with it is never asked for again.
        """
        if any(id_ == used for adapters in self._used() for used, _ in adapters):
            return False
        self._unset()
        self._backend.remove_adapter(id_)
        return True
