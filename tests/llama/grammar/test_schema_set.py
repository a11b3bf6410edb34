"""Schemas drawn at random: all that the grammar of one allows is JSON that follows it."""

from __future__ import annotations

import pytest

from tests.support.schema_set import drawn, examine
from trioserve.llama.backend import LlamaBackend


@pytest.mark.system
def test_all_that_a_schema_allows_is_valid(backend: LlamaBackend) -> None:
    schemas = drawn(40)
    report = examine(backend, schemas)
    assert report.invalid == []
    assert report.n_unfinished == 0
    assert report.n_accepted > len(schemas) // 2
    assert len(report.mask_us) > 1000


def test_the_same_schemas_are_drawn_again() -> None:
    assert drawn(5) == drawn(5)
