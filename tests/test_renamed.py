"""Names that have been renamed still work, and warn."""

from __future__ import annotations

from typing import Any

import pytest

import trioserve
from trioserve import testing


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (trioserve, "Options", "GenerationParams"),
        (trioserve, "Run", "AgentRun"),
        (trioserve, "TickRecord", "StepRecord"),
        (testing, "ticking", "stepping"),
    ],
)
def test_an_old_name_warns_and_is_the_new_one(module: Any, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now {module.__name__}.{new}"):
        found = getattr(module, old)
    assert found is getattr(module, new)


def test_an_old_attribute_warns() -> None:
    batch = trioserve.TelemetryBatch(events=(), n_lost=0)
    with pytest.warns(DeprecationWarning, match="TelemetryBatch.steps"):
        assert batch.ticks == ()
    prompt = trioserve.Prompt((1, 2), divergence_points=(1,))
    with pytest.warns(DeprecationWarning, match="Prompt.divergence_points"):
        assert prompt.hints == (1,)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = testing.nothing_like_this
