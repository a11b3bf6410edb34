"""`Runs`: the runs of a server, for whoever ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trio_util import AsyncValue

from trioserve.errors import ServerClosingError
from trioserve.server.runs.run import Run


class Runs:
    """The runs that are going on."""

    def __init__(self) -> None:
        self._runs: set[Run] = set()
        self._n_open = AsyncValue(0)

    @contextmanager
    def hold(self, run: Run) -> Iterator[None]:
        """Know a run for as long as a block lasts."""
        self._runs.add(run)
        self._n_open.value = len(self._runs)
        try:
            yield
        finally:
            self._runs.remove(run)
            self._n_open.value = len(self._runs)

    async def wait_none(self) -> None:
        """Wait until no run goes on."""
        await self._n_open.wait_value(0)

    def end_all(self, message: str) -> None:
        """End all runs; their readers get a ServerClosingError."""
        for run in self._runs:
            run.cancel(ServerClosingError(message))
