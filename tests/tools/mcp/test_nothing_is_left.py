"""After calls that were cancelled, at any moment, no process, descriptor or task is left."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import trio

from tests.support.cancellation import CancelAtStep
from tests.support.mcp_servers import call, odd, opened, pids_in
from tests.support.processes import is_alive

pytestmark = pytest.mark.system


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


async def test_500_random_calls_and_cancels(tmp_path: Path) -> None:
    chance = random.Random(17)
    pids = tmp_path / "pids"
    outcomes = {"answered": 0, "failed": 0, "cancelled": 0}
    descriptors, children, threads = _descriptors(), _children(), threading.active_count()

    async def one() -> None:
        name, arguments = chance.choices(
            [
                ("a_echo", {"text": "x"}),
                ("a_sleep", {"seconds": 1000}),
                ("a_progress", {"n": 3, "seconds": 0.001}),
                ("a_flood", {"n": 20}),
                ("a_content", {"result": 7}),
                ("a_die", {}),
            ],
            weights=[30, 30, 10, 10, 18, 2],
        )[0]
        with trio.move_on_after(chance.expovariate(30)):
            outcome = await call(servers, name, **arguments)
            outcomes["failed" if outcome.is_error else "answered"] += 1
            return
        outcomes["cancelled"] += 1

    async with opened(a=odd("log", pids)) as servers:
        for _ in range(20):
            async with trio.open_nursery() as nursery:
                for _ in range(25):
                    nursery.start_soon(one)
        assert (await call(servers, "a_echo", text="x")).text == "x"
    assert sum(outcomes.values()) == 500
    assert min(outcomes.values()) > 0, outcomes  # how many is up to the machine
    assert not any(map(is_alive, pids_in(pids)))
    assert (_descriptors(), _children()) == (descriptors, children)
    assert threading.active_count() <= threads + 10  # Trio keeps idle ones for a while


async def test_a_call_that_is_cancelled_at_any_step(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    descriptors, children = _descriptors(), _children()

    async def start_and_call() -> None:
        await call(servers, "a_progress", n=1, seconds=0)

    steps = 1
    async with opened(a=odd("log", pids)) as servers:
        while True:
            cancel = CancelAtStep(steps)
            await cancel.run(start_and_call)
            if cancel.steps < steps:
                break
            steps += 1
        assert (await call(servers, "a_echo", text="x")).text == "x"
    assert steps > 3
    assert not any(map(is_alive, pids_in(pids)))
    assert (_descriptors(), _children()) == (descriptors, children)


async def test_servers_that_are_closed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(17)
    descriptors, children = _descriptors(), _children()
    for i in range(15):
        with trio.move_on_after(chance.uniform(0, 0.15)):
            async with opened(a=odd("log", tmp_path / f"pids{i}"), b=odd("grandchild")) as servers:
                await call(servers, "a_sleep", seconds=1000)
    assert (_descriptors(), _children()) == (descriptors, children)
    for file in tmp_path.iterdir():
        assert not any(map(is_alive, pids_in(file)))
