"""The curve of a long prompt beside streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import curve
from benchmarks.stats import Sample
from benchmarks.targets import TargetError


def sample(gap: float, ttft: float) -> Sample:
    numbers = {"itl p99 meanwhile": gap, "long prompt ttft": ttft}
    return Sample(numbers=numbers, requests=5, failed=0)


SAMPLES = {
    "trioserve, default": [sample(80, 6000), sample(90, 6500), sample(100, 7000)],
    "trioserve, 20": [sample(30, 12_000)],
    "llama-server": [sample(2900, 5000), sample(2800, 5200)],
    "trioserve, 40": [Sample(numbers={}, requests=5, failed=0)],
}


def test_points_are_medians_in_order() -> None:
    lines = curve.points(SAMPLES)
    assert [(x, y.median) for x, y in lines["trioserve"]] == [(30, 12_000), (90, 6500)]
    assert [(x, y.median) for x, y in lines["llama-server"]] == [(2850, 5100)]


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(TargetError, match="nothing was measured"):
        curve.picture({}, "4 streams", "")


def test_a_program_that_is_none_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "x.gguf", "--llama-server", str(tmp_path), "--out", str(tmp_path / "out")]
    assert curve.main(options) == 2
    assert "is no program" in capsys.readouterr().err
