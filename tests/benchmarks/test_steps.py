"""The benchmark of steps runs, and measures what it says."""

from __future__ import annotations

import pytest
import trio

from benchmarks import steps


def test_an_engine_is_measured_while_all_slots_decode() -> None:
    cost = steps.measure_engine(3, steps.Device(0.0), 40)
    assert cost.n_slots == 3
    assert 0 < cost.python <= cost.step * 1.5  # two clocks
    assert cost.loop is None


def test_a_server_is_measured_with_its_event_loop() -> None:
    cost = trio.run(steps.measure_server, 3, steps.Device(0.0), 40)
    assert cost.loop is not None and cost.loop > 0
    assert cost.tokens_per_event is not None and cost.tokens_per_event >= 1


def test_only_steps_that_decode_all_slots_count() -> None:
    backend = steps.Metronome(2, steps.Device(0.0), 10)
    backend.seen = [(2, float(i), i * 0.1, i * 0.1 + 0.01) for i in range(steps.WARM_UP)]
    with pytest.raises(RuntimeError, match="every slot"):
        steps.cost_of(backend)
    backend.seen += [(2, 100.0, 10.0, 11.0), (2, 103.0, 11.25, 12.0), (1, 106.0, 13.0, 14.0)]
    (step,) = backend.steps()
    assert (step.wall, step.python) == (3.0, 0.25)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main(["--slots", "1,2", "--steps", "20", "--step-ms", "0.1"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "engine, 1 slots",
        "engine, 2 slots",
        "server, 1 slots",
        "server, 2 slots",
    ]
