"""Requests of low priority get a share of the steps beside others, and never stand still."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from tests.engine.background_simulation import COSTS, Machine, endless
from tests.engine.test_media import MediaHarness
from trioserve.bench.stats import percentile
from trioserve.engine.background import Background
from trioserve.engine.queue import AGEING_S
from trioserve.engine.strategy import TILE
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.types import Preempted


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("n_streams", [1, 3])
def test_the_gaps_of_a_stream_grow_little_beside_a_batch(name: str, n_streams: int) -> None:
    cost = COSTS[name]
    machine = Machine(cost)
    for task_id in range(1, n_streams + 1):
        machine.submit(task_id, f"{task_id} interactive")
    machine.run_beside(100)  # until it is known what rows cost
    n_before = machine.n_line_tokens()
    machine.run_beside(200)
    gaps = machine.gaps(1)[100:]
    assert percentile(gaps, 0.99) <= 1.26 * cost(n_streams)
    assert sum(gaps) / len(gaps) <= 1.26 * cost(n_streams)
    assert machine.n_line_tokens() > n_before


def test_where_rows_cost_nothing_a_batch_loses_nothing() -> None:
    machine = Machine(COSTS["rows cost nothing"])
    machine.submit(1, "interactive")
    machine.run_beside(300)
    assert machine.n_line_tokens() > 0.9 * 7 * 300


def test_alone_the_background_is_like_others() -> None:
    n_steps = []
    for priority in (0, -1):
        machine = Machine()
        for task_id in range(1, 9):
            machine.submit(task_id, f"{task_id} prompt", max_tokens=40, priority=priority)
        machine.run()
        n_steps.append((machine.backend.n_decodes, machine.seconds))
    assert n_steps[0] == n_steps[1]


def test_without_others_prompts_of_the_background_do_not_wait_for_streams() -> None:
    n_steps = {}
    for priority in (0, -1):
        machine = Machine(n_batch=512)
        machine.submit(1, "1", priority=priority)
        while not machine.n_tokens(1):
            machine.step()
        machine.submit(2, "2" * 200, priority=priority)
        before = machine.backend.n_decodes
        while not machine.n_tokens(2):
            machine.step()
        n_steps[priority] = machine.backend.n_decodes - before
    assert n_steps[-1] == 2 < n_steps[0] / 2  # two: nothing has said what prompts take


def test_a_request_that_arrives_ends_a_step_of_the_background_alone() -> None:
    machine = Machine(n_batch=4096)
    arrivals = iter(range(1, 3))
    for n in range(101, 105):
        machine.submit(n, f"{n}" * 100, max_tokens=8, priority=-100)

    def arrive(_: ScriptedBackend) -> None:
        if (task_id := next(arrivals, 0)) != 0:
            machine.submit(task_id, f"{task_id} interactive", max_tokens=5)

    machine.backend.on_decode = arrive
    machine.step()
    assert machine.backend.n_decoded == 0, "the first one ends it"
    machine.step()
    assert machine.n_tokens(1) == 1, "now it is not alone"
    machine.run()
    for task_id in (1, 2, *range(101, 105)):
        assert machine.text(task_id) == endless("")[: machine.finish(task_id).timings.predicted_n]


def test_the_background_does_not_stand_still_where_requests_arrive_all_the_time() -> None:
    machine = Machine(n_batch=4096)
    arrivals = itertools.count(1)
    machine.submit(1001, "b" * 2000, max_tokens=2, priority=-100)

    def arrive(backend: ScriptedBackend) -> None:
        if backend.n_new > TILE:
            machine.submit(next(arrivals), "interactive", max_tokens=1)

    machine.backend.on_decode = arrive
    for _ in range(200):
        machine.step()
    assert machine.n_tokens(1001) == 2


def test_the_streams_of_the_background_take_turns() -> None:
    machine = Machine(COSTS["a row costs a step"], n_slots=20)
    machine.submit(1, "interactive")
    for task_id in range(2, 21):
        machine.submit(task_id, f"{task_id}", priority=-5)
    lines = range(2, 21)
    while not all(map(machine.n_tokens, lines)):
        machine.step()
    before = {n: machine.n_tokens(n) for n in lines}
    while len(counts := {machine.n_tokens(n) - before[n] for n in lines}) > 1 or counts == {0}:
        assert max(counts) - min(counts) == 1 or counts == {0}
        machine.step()


def test_one_that_is_not_of_the_background_gets_a_slot_of_it() -> None:
    machine = Machine(n_slots=2)
    for task_id in (1, 2):
        machine.submit(task_id, f"{task_id} background", max_tokens=50, priority=-1)
        machine.step()
    machine.submit(3, "more background", max_tokens=5, priority=-1)
    machine.step()
    assert machine.admitted == [1, 2]
    machine.submit(4, "interactive", max_tokens=5)
    machine.step()
    assert machine.admitted == [1, 2, 4], "the younger one loses its slot"
    assert any(isinstance(event, Preempted) for event in machine.events[2])
    machine.run()
    for task_id, n in ((1, 50), (2, 50), (3, 5), (4, 5)):
        assert machine.text(task_id) == endless("")[:n]
    assert machine.finish(2).timings.prompt_n == len("2 background"), "nothing is prefilled twice"


def test_one_that_has_waited_for_long_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(n_slots=1)
    machine.submit(1, "background", max_tokens=5, priority=-2)
    machine.step()
    request = machine.engine._scheduler.slots[0].request
    assert request is not None
    request.submitted_at -= 2 * AGEING_S
    machine.submit(2, "interactive", max_tokens=5)
    machine.run()
    assert machine.admitted == [1, 2]


def test_no_other_waits_for_a_prompt_of_the_background_that_it_shares() -> None:
    machine = Machine(n_batch=64)
    shared = "s" * 200
    machine.submit(1, shared + "background", priority=-1)
    machine.step()
    machine.submit(2, shared + "interactive")
    machine.submit(3, shared + "more background", priority=-1)
    machine.step()
    assert machine.admitted == [1, 2]
    machine.run_beside(5, task_id=2)


def test_prompts_of_the_background_do_not_make_streams_slower_than_the_share() -> None:
    machine = Machine()
    machine.submit(1, "interactive")
    machine.run_beside(100)
    machine.submit(50, "long " * 80, max_tokens=1, priority=-1)
    while not machine.n_tokens(50):
        machine.run_beside(100)
    assert percentile(machine.gaps(1)[100:], 0.99) <= 12.6


def test_a_prompt_gets_ahead_of_the_background() -> None:
    machine = Machine()
    machine.submit(1, "interactive", max_tokens=60)
    machine.run_beside(60)
    for _ in range(20):  # now the batch is alone
        machine.send_lines(8)
        machine.step()
    began = machine.seconds
    machine.submit(2, "i" * 200, max_tokens=1)
    machine.run_beside(1, task_id=2)
    prefill_s = machine.cost(200) / 1e3
    assert machine.seconds - began < 1.5 * prefill_s


def test_media_of_the_background_waits_for_its_share() -> None:
    one = MediaHarness(ScriptedProjector(n_cells=30))
    one.ask(1, "interactive", max_tokens=200)
    one.step()
    one.ask(2, "[image:x]", max_tokens=1, priority=-1)
    one.step()
    one.encoder.encode_next()
    n_steps = 0
    while not one.events[2]:
        one.step()
        n_steps += 1
        assert n_steps < 190
    assert n_steps > 2


@settings(max_examples=15)
@given(
    plain_ms=st.floats(0.2, 100),
    row=st.floats(0, 3),
    jump=st.floats(0, 3),
    noise=st.lists(st.floats(0.7, 1.6), min_size=7, max_size=7),
    n_streams=st.integers(1, 4),
)
def test_streams_are_in_each_step_and_the_background_never_stands_still(
    plain_ms: float, row: float, jump: float, noise: list[float], n_streams: int
) -> None:
    factors = itertools.cycle(noise)

    def cost(n: int) -> float:
        return plain_ms * next(factors) * (1 + (jump if n > n_streams else 0) + row * (n - 1))

    machine = Machine(cost)
    for task_id in range(1, n_streams + 1):
        machine.submit(task_id, f"{task_id} interactive")
    while not all(map(machine.n_tokens, range(1, n_streams + 1))):
        machine.step()
    before, n_decodes = machine.n_tokens(1), machine.backend.n_decodes
    n_still = n_before = 0
    for _ in range(200):
        machine.send_lines(10, max_tokens=4)
        machine.step()
        n_rows = machine.engine._counters.prompt_tokens + machine.n_line_tokens()
        n_still = 0 if n_rows > n_before else n_still + 1
        n_before = n_rows
        # The bound of the credit pays for what the slowest steps of the background take.
        assert n_still <= 3 * Background.AHEAD * (1 + Background.SHARE) / Background.SHARE
    assert machine.n_tokens(1) - before == machine.backend.n_decodes - n_decodes
