"""The benchmark of batches runs, and measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import batches


@pytest.mark.system
def test_it_measures_a_batch_and_a_stream_beside_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--lines", "6", "--clients", "2", "--max-tokens", "4", "--rounds", "1"]
    small += ["--streams", "1", "--stream-tokens", "64", "--lines-beside", "100"]
    code = batches.main([*small, "--quiet", "--json", str(tmp_path / "out")])
    assert code in (0, 1)
    printed = capsys.readouterr().out
    assert "tokens/s of the batch: " in printed and "gaps of the stream, p99: " in printed
    results = json.loads((tmp_path / "out").read_text())["results"]
    numbers = results["throughput"]["batch"][0]["numbers"]
    assert numbers["tokens/s"] * numbers["wall s"] == pytest.approx(6 * 4)
    assert results["gaps"]["beside"][0]["numbers"]["tokens"] == 64
