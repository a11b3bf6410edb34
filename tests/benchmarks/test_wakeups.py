"""The benchmark of wake-ups runs over each bridge, and counts each row at least once."""

from __future__ import annotations

import pytest
import trio

from benchmarks import wakeups


@pytest.mark.parametrize("name", wakeups.KINDS)
def test_each_row_wakes_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "N_ROWS", 5)
    cost = trio.run(wakeups.measure, wakeups.KINDS[name], 3)
    assert cost.notify_us > 0 and cost.loop_us > 0
    assert 1 <= cost.n_wakeups <= 3
