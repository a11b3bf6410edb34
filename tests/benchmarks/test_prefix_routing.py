"""The simulation of routers of requests counts what it says it counts."""

from __future__ import annotations

import math

import attrs
import pytest

from benchmarks.prefix_routing import (
    ROUTERS,
    Replica,
    Simulation,
    Traffic,
    Turn,
    main,
    numbers_of,
    recovery,
)

FEW = Traffic(replicas=20, prompts=500, rate=40, ingresses=2, seconds=30, warm_up=10)


def simulate(router: str, traffic: Traffic = FEW) -> Simulation:
    simulation = Simulation(traffic, ROUTERS[router], 1)
    simulation.run()
    return simulation


def test_trioserves_router_finds_most_of_what_is_cached() -> None:
    ours, random = (numbers_of(simulate(name)) for name in ("trioserve", "random"))
    assert ours["cached share"] > random["cached share"] + 0.2
    assert ours["of what could be"] > 0.7
    assert ours["ttft p50 s"] < random["ttft p50 s"]


def test_every_turn_is_served_once_and_after_it_came() -> None:
    simulation = simulate("learning")
    turns = len(simulation.served) + sum(len(one.queue) for one in simulation.replicas.values())
    assert turns == simulation.decisions
    # All that began, and those that follow them, as far as there was time for them.
    assert FEW.rate * FEW.seconds * (1 - FEW.follows) < turns < FEW.rate * FEW.seconds
    assert all(0 <= one.cached <= one.length and one.ttft >= 0 for one in simulation.served)
    assert all(one.cached <= one.known <= one.length for one in simulation.served)
    assert all(0 <= one.busy <= FEW.slots for one in simulation.replicas.values())
    assert numbers_of(simulation)["busiest / mean"] >= 1


def test_a_cache_is_bounded_and_forgets_what_was_used_least_recently() -> None:
    replica = Replica("a", 1000)
    turns = [Turn(i, 300, 10 + i, 400, 10, []) for i in range(3)]
    for turn in turns:
        replica.keep(turn, 400)
    assert [replica.cached(turn) for turn in turns] == [0, 400, 400]
    assert replica.used <= 1000
    again = attrs.evolve(turns[1], conversation=99)
    assert replica.cached(again) == 300  # its system prompt


def test_replicas_come_and_go() -> None:
    simulation = simulate("trioserve", attrs.evolve(FEW, churn=15.0))
    assert len(simulation.replicas) == FEW.replicas
    assert sum(name.endswith("-new") for name in simulation.replicas) == 2
    shares = recovery(simulation)
    assert [at for at, _ in shares] == [-10.0, -5.0, 0.0, 5.0, 10.0]
    assert all(0 < share < 1 for _, share in shares)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replicas", "10", "--seconds", "20"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [row[1].strip() for row in rows[2:]] == list(ROUTERS)
    assert all(math.isfinite(float(value)) for row in rows[2:] for value in row[2:-1])
