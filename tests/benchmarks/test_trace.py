"""The trace of short requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import trace
from benchmarks.trace import PARTS, WHOLE, Seen
from trioserve.models import BUNDLED


def test_each_part_takes_the_time_since_the_one_before() -> None:
    marks = {"id": "a"} | {part: 10 + i for i, part in enumerate(PARTS)}
    del marks["received"]
    seen = [Seen("a", sent=9.5, received=30, prefill=1), Seen("b", sent=9, received=30, prefill=1)]
    found = trace.parts_of([marks], seen)
    titles = [*PARTS.values()]
    assert [found[title] for title in titles[:2]] == [[500], [1000]]
    assert found[titles[-1]] == [1000 * (30 - 10 - len(PARTS) + 2)]
    assert found[WHOLE] == [20_500]


def test_a_panel_has_the_parts_in_their_order() -> None:
    ours = {title: [1.0, 2.0, 9.0] for title in (*PARTS.values(), WHOLE)}
    panel, other = trace.panels({1: {"trioserve": ours, "llama-server": {WHOLE: [5.0]}}, 8: {}})
    assert (panel.title, other.title) == ("1 client at once, ms", "8 clients at once, ms")
    assert [row.label for row in panel.rows] == [*PARTS.values(), WHOLE]
    assert panel.rows[0].values["trioserve"].median == 2
    assert [*panel.rows[-1].values] == ["trioserve", "llama-server"]


@pytest.mark.system
def test_a_server_is_traced(tmp_path: Path) -> None:
    options = ["--model", str(BUNDLED), "--clients", "1,2", "--requests", "2", "--rounds", "1"]
    options += ["--max-tokens", "4", "--out", str(tmp_path), "--quiet"]
    assert trace.main(options) == 0
    found = json.loads((tmp_path / "trace.json").read_text())["milliseconds"]
    for n_clients in ("1", "2"):
        parts = found[n_clients]["trioserve"]
        assert [*parts] == [*PARTS.values(), WHOLE]
        assert all(time >= 0 for times in parts.values() for time in times)
    assert "time to the first token" in (tmp_path / "trace.svg").read_text()
