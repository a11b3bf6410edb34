"""The benchmark of streams that can be resumed runs, and measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import resumable
from benchmarks.plan import Plan, Request


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


def test_each_request_has_a_name_of_its_own() -> None:
    request = Request("POST", "/completion", b"{}", (("A", "b"),))
    named = resumable._named(Plan(requests=[request, request]), "x", ("Prefer", "y"))
    assert [each.headers[1] for each in named.requests] == [
        ("X-Conversation-Id", "x 0"),
        ("X-Conversation-Id", "x 1"),
    ]
    assert named.requests[0].headers[0] == ("A", "b")
    assert named.requests[0].headers[2] == ("Prefer", "y")
