"""The start of a server is measured, in time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import start
from benchmarks.harness import Flags, trioserve
from trioserve.models import BUNDLED


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_a_start_has_all_its_numbers(tmp_path: Path) -> None:
    start.forget(BUNDLED)
    flags = Flags(model=BUNDLED, slots=0)
    sample = start.measure(trioserve(), flags, tmp_path / "log", n_tokens=2)
    assert set(sample.numbers) == {metric.name for metric in start.METRICS}
    assert all(number > 0 for number in sample.numbers.values())
    assert sample.numbers["of this, no file's"] < sample.numbers["PSS"]
