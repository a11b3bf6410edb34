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

from tests.ray_cluster.cluster import Cluster, line_to, n_busy
from tests.ray_cluster.conftest import Report
from tests.ray_cluster.forms import CHAT
from trioserve.bench.stats import percentile
from trioserve.model_process.connection import Connection

pytestmark = pytest.mark.system

#: The number of clients that leave, one after the other.
_N = 30


@pytest.fixture
async def servers(cluster: Cluster) -> AsyncIterator[list[Connection]]:
    """Connections to the processes of all replicas."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(line_to(one)) for one in cluster.children()]


async def _find_busy(servers: list[Connection]) -> Connection:
    with trio.fail_after(60):
        while True:
            for server in servers:
                if await n_busy(server):
                    return server


async def _leave(
    client: httpx.AsyncClient, servers: list[Connection], body: dict[str, Any]
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
        while await n_busy(server):
            assert monotonic() - left < 1
    return monotonic() - left


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_leaving_frees_the_slot(
    cluster: Cluster, servers: list[Connection], report: Report, stream: bool
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
