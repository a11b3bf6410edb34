"""Damaged models, adapters, projectors and speakers: none of them ends a process that serves.

Each file goes through the checks of its header, a load with a trial, and then what requests ask
for, in a separate process. If that process dies after the trial, a server would have died.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.file_trials import DIED_IN_SERVICE, OUTCOMES, run
from tests.support.measured import Report

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

#: The number of each kind: that of an attack, and a thousand more.
_SERIES = [
    ("model", 0, 391), ("adapter", 0, 79), ("projector", 0, 186),
    ("speech", 0, 300),
    ("model", 1000, 600), ("adapter", 1000, 150), ("projector", 1000, 250),
]  # fmt: skip
_STEP = 100
_PARTS = [
    (kind, start, min(_STEP, first + count - start))
    for kind, first, count in _SERIES
    for start in range(first, first + count, _STEP)
]


@pytest.mark.parametrize(("kind", "first", "count"), _PARTS)
def test_no_damaged_file_ends_a_server(
    tmp_path: Path, report: Report, kind: str, first: int, count: int
) -> None:
    found = run(tmp_path, f"{kind}:{first}:{count}")
    tally = Counter(one["outcome"] for one in found)
    said = ", ".join(f"{tally[outcome]} {outcome}" for outcome in OUTCOMES)
    report(f"{count} damaged files ({kind}, from {first}): {said}")
    assert len(found) == count
    assert [one for one in found if one["outcome"] == DIED_IN_SERVICE] == []
