"""Servers that sleep, played by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.scripted_server import ScriptedLoader
from trioserve.server import Server
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.testing import ScriptedBackend


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look at all objects of the tests again and again."""
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)


async def until(server: Server, state: ServerState) -> None:
    await server.lifecycle.state.wait_value(state)


async def wake(server: Server) -> None:
    async with server.loaded():
        pass


def n_loads(loader: ScriptedLoader) -> int:
    return len(loader.backends)


@asynccontextmanager
async def falling_awake(**config: object) -> AsyncIterator[tuple[Server, ScriptedLoader]]:
    """A server that is asleep, and wakes for as long as `may_go_on` is not set."""
    loader = ScriptedLoader(lambda: ScriptedBackend(n_slots=1, n_seqs=1))
    async with loader.serve(**config) as server:
        await server.sleep()
        loader.may_go_on.clear()
        try:
            yield server, loader
        finally:
            loader.may_go_on.set()


async def cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()
