"""The caches of replicas: requests that begin alike go to the replica that has the beginning."""

from __future__ import annotations

import random

import httpx
import pytest
import trio

from tests.ray_cluster.cluster import Cluster
from tests.ray_cluster.conftest import Report

pytestmark = pytest.mark.system

_N_SYSTEMS, _N_QUESTIONS, _N_CLIENTS = 20, 8, 4

#: Words of each system prompt.
_LENGTH = 1000
_WORDS = ("north", "south", "river", "stone", "bread", "winter", "letter", "market", "garden")

#: The share of prompt tokens found in a cache, of requests whose system prompt was sent before.
_WANTED = 0.9


def _system(number: int) -> str:
    rng = random.Random(number)
    return f"Rules {number}: " + " ".join(rng.choices(_WORDS, k=_LENGTH))


async def test_system_prompts_are_cached(cluster: Cluster, report: Report) -> None:
    questions = [(system, n) for system in range(_N_SYSTEMS) for n in range(_N_QUESTIONS)]
    random.Random(1).shuffle(questions)
    known: set[int] = set()
    cached = total = 0

    async def ask(client: httpx.AsyncClient, system: int, number: int) -> None:
        nonlocal cached, total
        counts = system in known
        messages = [
            {"role": "system", "content": _system(system)},
            {"role": "user", "content": f"What is {number} and {system}?"},
        ]
        body = {"model": "ash", "messages": messages, "max_tokens": 4}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        known.add(system)
        if counts:
            usage = answer.json()["usage"]
            total += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            while questions:
                await ask(client, *questions.pop())

    async with trio.open_nursery() as nursery:
        for _ in range(_N_CLIENTS):
            nursery.start_soon(run)
    what = f"{_N_SYSTEMS} system prompts, {cluster.plan.options['replicas']} replicas"
    report(f"{what}: share of the prompts that was in a cache", f"{cached / total:.3f}")
    assert cached / total >= _WANTED
