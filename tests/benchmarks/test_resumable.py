"""The benchmark of streams that can be resumed runs, and measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import resumable


@pytest.mark.system
def test_it_measures_both_kinds_and_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--clients", "2", "--requests", "1", "--max-tokens", "8", "--rounds", "1"]
    code = resumable.main([*small, "--streams", "4", "--quiet", "--json", str(tmp_path / "out")])
    assert code in (0, 1)
    printed = capsys.readouterr().out
    assert "resumable" in printed
    assert "loop cpu/event" in printed
    assert "4 streams at once: 0." in printed
