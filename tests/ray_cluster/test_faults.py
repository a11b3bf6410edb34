"""Processes are killed while clients ask: what is lost, and how long until all is as before."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic

import pytest
import trio

from tests.ray_cluster.cluster import Cluster
from tests.ray_cluster.conftest import Report
from tests.ray_cluster.load import Load, loaded

pytestmark = pytest.mark.system

#: Requests that are answered before something is killed, and after all is well again.
_ENOUGH = 20


async def _answered(load: Load, n: int) -> None:
    """Wait until that many more requests are answered."""
    wanted = load.count()["done"] + n
    with trio.move_on_after(120):
        while load.count()["done"] < wanted:
            await trio.sleep(0.05)
        return
    pytest.fail(f"only {load.count()} in two minutes: {load.faults()}")


async def _is_gone(pid: int, timeout: float) -> bool:
    """Wait for the end of a process."""
    with trio.move_on_after(timeout):
        while os.path.exists(f"/proc/{pid}"):
            await trio.sleep(0.02)
        return True
    return False


async def _kill_under_load(cluster: Cluster, kill: Callable[[], None]) -> tuple[Load, float]:
    """Let clients ask, kill something, and wait until it was replaced.

    Returns what came of the requests, and the seconds until all replicas were back.
    """
    async with loaded(cluster.url, list(cluster.plan.models)) as load:
        await _answered(load, _ENOUGH)
        kill()
        recovery = await cluster.whole_after()
        recovered = monotonic()
        await _answered(load, _ENOUGH)
    assert set(load.count(since=recovered)) <= {"done", "left"}, load.faults()
    await cluster.free_after(1)
    return load, recovery


def _figures(load: Load, recovery: float) -> str:
    counts = load.count()
    kinds = {"done": "answered", "left": "left by the client", "error": "ended with an error event",
             "cut": "cut off", "refused": "lost before the first byte"}  # fmt: skip
    said = [f"{counts.pop(kind)} {words}" for kind, words in kinds.items() if counts[kind]]
    assert not +counts, load.faults()
    return f"{', '.join(said)}; all back after {recovery:.1f} s"


@pytest.mark.parametrize("victim", ["server", "replica"])
async def test_a_killed_model_loses_no_request_that_has_not_begun(
    cluster: Cluster, report: Report, victim: str
) -> None:
    child, replica = cluster.children()[0], cluster.model_replicas()[0]

    load, recovery = await _kill_under_load(
        cluster, child.kill if victim == "server" else replica.kill
    )
    report(f"`kill -9` of the {victim} of a model", _figures(load, recovery))
    assert set(load.count()) <= {"done", "left", "error"}, load.faults()
    assert await _is_gone(child.pid, 1)


async def test_a_killed_ingress(cluster: Cluster, report: Report) -> None:
    """Its requests break off, and no others: there is no caller left to ask another replica."""
    ingress = cluster.ingresses()[0]
    load, recovery = await _kill_under_load(cluster, ingress.kill)
    report("`kill -9` of an ingress", _figures(load, recovery))
    counts = load.count()
    assert set(counts) <= {"done", "left", "cut", "refused"}, load.faults()
    assert counts["cut"] + counts["refused"] <= load.n_clients


async def test_a_killed_node(cluster: Cluster, report: Report) -> None:
    node = next(node for node in cluster.processes(lambda p: p.is_node and not p.is_head))
    n_ingresses = sum(one.node == node for one in cluster.ingresses())
    load, recovery = await _kill_under_load(cluster, lambda: cluster.kill_node(node))
    report(f"a lost node, with {n_ingresses} of the ingresses", _figures(load, recovery))
    with_ingress = {"cut", "refused"} if n_ingresses else set()
    assert set(load.count()) <= {"done", "left", "error"} | with_ingress, load.faults()
    await trio.to_thread.run_sync(cluster.add_node)
