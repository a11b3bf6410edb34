"""Clients share the cells of an elastic KV cache: each waits a bounded number of steps.

Waits are counted in steps.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engine_harness import Harness
from trioserve.testing import ScriptedBackend
from trioserve.types import Finished, Preempted

N_CTX = 256

#: Steps in which a request keeps the cells of preempted ones: its prompt and an eighth more.
KEPT = N_CTX / 16 + N_CTX / 8


def endless(prompt: str) -> str:
    return f"{prompt.upper()} and so on, " * N_CTX


class Sent(NamedTuple):
    client: str
    n_prompt: int
    n_output: int
    step: int = 0


class Clients(Harness):
    """Clients of an engine that counts its steps, and the steps that each client waits."""

    def __init__(self, n_slots: int = 4, cache_ram: int = 10**6) -> None:
        backend = ScriptedBackend(
            endless, n_slots=n_slots, n_ctx=N_CTX, n_ctx_seq=N_CTX, n_batch=64, is_elastic=True
        )
        super().__init__(backend, cache_ram=cache_ram)
        self.sent: dict[int, Sent] = {}
        self.n_steps = 0
        #: Steps since a client has no request in a slot, while one waits and a slot is idle.
        self.waits: Counter[str] = Counter()

    def send(self, client: str, n_prompt: int, n_output: int, **options: float) -> int:
        task_id = len(self.sent) + 1
        prompt = f"{task_id:3} {client * N_CTX}"[:n_prompt]
        self.submit(task_id, prompt, client=client, max_tokens=n_output, **options)
        self.sent[task_id] = Sent(client, n_prompt, n_output, self.n_steps)
        return task_id

    def step(self) -> bool:
        self.n_steps += 1
        work_left = super().step()
        scheduler = self.engine._scheduler
        idle = len(scheduler.running()) < len(scheduler.slots)
        waiting = {request.task.client for request in scheduler.waiting}
        hungry = waiting - {request.task.client for request in scheduler.running()}
        self.waits = Counter({one: self.waits[one] + 1 for one in hungry if idle})
        return work_left

    def is_over(self, task_id: int) -> bool:
        return bool(self.events[task_id]) and isinstance(self.events[task_id][-1], Finished)

    def until_over(self, task_id: int) -> None:
        while not self.is_over(task_id):
            self.step()

    def n_preempted(self, task_id: int) -> int:
        return sum(isinstance(event, Preempted) for event in self.events[task_id])

    def check_outputs(self) -> None:
        """Clients do not affect one another."""
        for task_id, (client, n_prompt, n_output, _) in self.sent.items():
            prompt = f"{task_id:3} {client * N_CTX}"[:n_prompt]
            n_most = min(n_output, N_CTX - n_prompt)
            assert self.text(task_id) == endless(prompt)[:n_most]


def test_a_small_request_does_not_wait_for_the_growing_ones_of_another_client() -> None:
    clients = Clients()
    flood = [clients.send("a", 50, 180) for _ in range(6)]
    for _ in range(20):
        clients.step()  # the first four were more than fit
    waits = []
    while not all(map(clients.is_over, flood)):
        small, sent = clients.send("b", 16, 10), clients.n_steps
        while small not in clients.admitted:
            clients.step()
        waits.append(clients.n_steps - sent)
        clients.until_over(small)
    assert len(waits) > 40 and max(waits) <= 16 / 2 + 1
    assert sorted(waits)[len(waits) // 2] == 1
    clients.check_outputs()


@pytest.mark.parametrize("cache_ram", [0, 10**6])
@settings(max_examples=15, deadline=None)
@given(
    n_slots=st.integers(2, 5),
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0]), min_size=4, max_size=4),
    sizes=st.lists(
        st.builds(
            Sent,
            st.sampled_from("abcd"),
            st.one_of(st.integers(4, 20), st.integers(4, N_CTX - 1)),
            st.one_of(st.integers(1, 20), st.integers(1, N_CTX)),
            st.integers(0, 300),
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_a_client_without_a_slot_gets_one_in_time(
    cache_ram: int, n_slots: int, weights: list[float], sizes: list[Sent]
) -> None:
    clients = Clients(n_slots, cache_ram)
    later = sorted(sizes, key=lambda one: one.step)
    n_clients = len({one.client for one in sizes})
    while later or clients.engine.has_work:
        while later and later[0].step <= clients.n_steps:
            client, n_prompt, n_output, _ = later.pop(0)
            weight = weights["abcd".index(client)]
            clients.send(client, n_prompt, n_output, weight=weight)
        clients.step()
        for request in clients.engine._scheduler.waiting:
            n_most = len(request.keys) / 2 + n_clients * KEPT
            assert clients.waits[request.task.client] <= n_most
    assert all(map(clients.is_over, clients.sent))
    assert max(map(clients.n_preempted, clients.sent)) <= 12
    clients.check_outputs()


def test_a_request_of_lower_priority_does_not_pass_one_that_waits_for_cells() -> None:
    clients = Clients()
    low = clients.send("a", 150, 80)
    clients.step()
    high, sent = clients.send("b", 150, 10, priority=1), clients.n_steps
    small = clients.send("c", 10, 10)
    while high not in clients.admitted:
        assert small not in clients.admitted
        clients.step()
    assert clients.n_steps - sent <= 150 / 2 + 1 and clients.n_preempted(low) == 1
    clients.run()
    clients.check_outputs()
