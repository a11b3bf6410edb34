"""A field that is left out of requests is logged once, and the memory of that has a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from trioserve import left_out as module
from trioserve.left_out import leave_out

#: What the log says is left out since the last call: what, and why.
LeftOut: TypeAlias = Callable[[], list[tuple[str, str]]]


def test_each_is_logged_once(left_out: LeftOut) -> None:
    for _ in range(2):
        leave_out("seed", "too long")
        leave_out("seed", "too short")
        leave_out("x" * 500, "too long")
        leave_out("tools[0].type", "not here")
        leave_out("tools[1].type", "not here")
    assert left_out() == [
        ("seed", "too long"),
        ("seed", "too short"),
        ("x" * 200, "too long"),
        ("tools[].type", "not here"),
    ]


def test_clients_cannot_fill_the_memory(left_out: LeftOut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LOGGED", 2)
    for i in range(5):
        leave_out(f"tool {i}", "not here")
    assert [what for what, _ in left_out()] == ["tool 0", "tool 1"]
