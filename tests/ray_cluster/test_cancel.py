"""Clients that leave: how long their slots stay in use."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import httpx
import pytest
import trio

from tests.ray_cluster.cluster import Cluster, client_of
from tests.ray_cluster.conftest import Report
from tests.ray_cluster.forms import CHAT
from trioserve.bench.stats import percentile

pytestmark = pytest.mark.system

#: How many clients leave, one after the other.
_N = 30


@pytest.fixture
async def servers(cluster: Cluster) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients that ask the servers of all replicas directly."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client_of(one)) for one in cluster.children()]


async def _is_busy(server: httpx.AsyncClient) -> bool:
    return any(slot["is_processing"] for slot in (await server.get("/slots")).json())


async def _find_busy(servers: list[httpx.AsyncClient]) -> httpx.AsyncClient:
    with trio.fail_after(60):
        while True:
            for server in servers:
                if await _is_busy(server):
                    return server


async def _leave(
    client: httpx.AsyncClient, servers: list[httpx.AsyncClient], body: dict[str, Any]
) -> float:
    """Ask, leave when a slot is in use, and return the seconds until it is not."""

    async def ask() -> None:
        with scope:
            await client.post(CHAT.path, json=body)

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        server = await _find_busy(servers)
        await trio.sleep(random.uniform(0, 0.1))
        left = monotonic()
        scope.cancel()
        while await _is_busy(server):
            assert monotonic() - left < 1
    return monotonic() - left


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_leaving_frees_the_slot(
    cluster: Cluster, servers: list[httpx.AsyncClient], report: Report, stream: bool
) -> None:
    times = []
    for number in range(_N):
        text = f"Count from {number} to a thousand."
        body = CHAT.write(random.choice(list(cluster.plan.models)), text, 3000)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            times.append(1000 * await _leave(client, servers, {**body, "stream": stream}))
    what = "a stream" if stream else "a whole answer"
    figures = f"{percentile(times, 0.5):.0f} ms, at most {max(times):.0f} ms, of {_N}"
    report(f"the client of {what} leaves: slot free after", figures)
