"""The choices of the request router for Serve. `tests/ray_cluster` tries it on several nodes."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import trio

pytest.importorskip("ray.serve", reason="ray is not installed: pip install 'trioserve[ray]'")

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from tests.support.ray_replicas import hint_of
from trioserve.ray.prefix_affinity import RoutingHint
from trioserve.ray.request_router import PrefixRouter


def replica(name: str, **stats: float) -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name), max_ongoing_requests=8, routing_stats=stats
    )


def request(*args: object) -> Any:
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(args=[{}, *args], kwargs={}, routing_context=context)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> PrefixRouter:
    """A router that knows of Serve only what the replicas have in their queues."""
    queues: dict[Any, int] = {}
    monkeypatch.setattr(
        PrefixRouter,
        "replica_queue_len_cache",
        SimpleNamespace(get=lambda one: queues.get(one.unique_id)),
    )
    made = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    made.queues = queues
    return made


def choose(router: PrefixRouter, replicas: list[Any], asked: Any) -> list[str]:
    ranks = trio.run(router.choose_replicas, replicas, asked)
    assert all(rank for rank in ranks)
    return [one.replica_id.unique_id for rank in ranks for one in rank]


DEPLOYMENT = DeploymentID(name="model", app_name="app")
HINT = hint_of("/v1/completions", {"prompt": "word " * 4000})


def test_a_request_goes_where_it_began_unless_that_is_full(router: PrefixRouter) -> None:
    replicas = [replica(name, slots=2) for name in "abc"]
    asked = request(HINT)
    home = choose(router, replicas, asked)[0]
    assert asked.routing_context.should_backoff
    assert choose(router, replicas, request(HINT))[0] == home
    router.queues[home] = 7
    assert choose(router, replicas, request(HINT))[0] != home


def test_replicas_say_how_full_they_are(router: PrefixRouter) -> None:
    replicas = {name: replica(name, slots=2) for name in "ab"}
    home = choose(router, [*replicas.values()], request(HINT))[0]
    replicas[home].routing_stats = {"slots": 2, "running": 2, "waiting": 6}
    assert choose(router, [*replicas.values()], request(HINT))[0] != home
    replicas[home].routing_stats = {"slots": 2, "kv": 9.0}
    assert choose(router, [*replicas.values()], request(HINT))[0] != home
    replicas[home].routing_stats = None
    assert choose(router, [*replicas.values()], request(HINT))[0] == home


def test_a_key_goes_to_its_replica_and_to_no_other(router: PrefixRouter) -> None:
    replicas = [replica(name) for name in "abcde"]
    first = choose(router, replicas, request(RoutingHint(key="chat-7")))
    assert len(first) == 1
    router.queues[first[0]] = 99
    assert choose(router, replicas, request(RoutingHint(HINT.blocks, "chat-7"))) == first


def test_requests_without_a_hint_go_somewhere(router: PrefixRouter) -> None:
    replicas = [replica(name) for name in "abc"]
    assert set(choose(router, replicas, request())) <= set("abc")
    assert set(choose(router, replicas, None)) <= set("abc")


def test_whatever_fails_requests_go_somewhere(
    router: PrefixRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [replica(name) for name in "abc"]
    monkeypatch.setattr(router._homes, "rank", lambda *_: 1 / 0)
    told: list[str] = []
    monkeypatch.setattr("trioserve.ray.request_router._log.exception", told.append)
    for _ in range(3):
        assert len(set(choose(router, replicas, request(HINT)))) == 2
    assert len(told) == 1


def test_replicas_that_are_gone_are_not_chosen(router: PrefixRouter) -> None:
    replicas = [replica(name) for name in "abc"]
    home = choose(router, replicas, request(HINT))[0]
    rest = [one for one in replicas if one.replica_id.unique_id != home]
    assert home not in choose(router, rest, request(HINT))


# -- with Serve's part of it, but without a cluster


class Running:
    """A replica as Serve sees it: its limit of requests, and the number that it has."""

    node_id, availability_zone, routing_stats = "node", None, {"slots": 2}
    max_ongoing_requests = 4
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.taken = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.taken


class Serve:
    """Sends requests to three replicas as Serve's own code does."""

    def __init__(self) -> None:
        self.router = PrefixRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.replicas = [Running(name) for name in "abc"]
        self.router.update_replicas(self.replicas)
        self.used: dict[int, Counter[str]] = defaultdict(Counter)
        self._numbers = iter(range(10_000))

    async def send(self, prompt: int, turns: int = 3, identity: str | None = None) -> None:
        """Send a request that begins with this prompt, and lasts `turns` turns of the loop."""
        number = next(self._numbers)
        hint = hint_of("/completion", {"prompt": f"{prompt} words " * 900 + str(number)})
        metadata = RequestMetadata(
            request_id=f"{number}", internal_request_id=identity or f"id-{number}"
        )
        pending = PendingRequest(args=[{}, hint], kwargs={}, metadata=metadata)
        replica = await self.router._choose_replica_for_request(pending)
        while replica.taken >= replica.max_ongoing_requests:  # it refuses
            self.router.replica_queue_len_cache.update(replica.replica_id, replica.taken)
            replica = await self.router._choose_replica_for_request(pending, is_retry=True)
        replica.taken += 1
        self.router.replica_queue_len_cache.update(replica.replica_id, replica.taken)
        self.used[prompt][replica.replica_id.unique_id] += 1
        for _ in range(turns):
            await asyncio.sleep(0)
        replica.taken -= 1
        self.router.replica_queue_len_cache.update(replica.replica_id, replica.taken)


def test_twenty_prompts_are_each_at_one_of_three_replicas() -> None:
    async def main() -> None:
        serve = Serve()
        for i in range(200):
            await serve.send(i % 20)
        assert all(len(replicas) == 1 for replicas in serve.used.values())
        assert len({name for replicas in serve.used.values() for name in replicas}) == 3

    asyncio.run(main())


def test_nothing_is_lost_of_many_requests_at_once() -> None:
    async def main() -> None:
        serve = Serve()
        async with asyncio.timeout(30):
            await asyncio.gather(*(serve.send(i % 20) for i in range(150)))
        assert sum(sum(replicas.values()) for replicas in serve.used.values()) == 150
        assert [one.taken for one in serve.replicas] == [0, 0, 0]

    asyncio.run(main())


def test_calls_on_behalf_of_one_request_all_get_a_replica() -> None:
    async def main() -> None:
        serve = Serve()
        async with asyncio.timeout(30):
            await asyncio.gather(*(serve.send(i % 20, identity="the same") for i in range(100)))
        assert sum(sum(replicas.values()) for replicas in serve.used.values()) == 100

    asyncio.run(main())
