"""A router and the processes of its models are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import children


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_a_router_has_all_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert children.main(["--rounds", "1"]) == 0
    table = capsys.readouterr().out
    assert all(metric.name in table for metric in children.METRICS)
