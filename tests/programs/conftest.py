"""The table of what works, which is written into the docs when all tests have run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.programs.table import PAGE, Works, written


@pytest.fixture(scope="session")
def works() -> Iterator[Works]:
    """Takes what a program was seen to do."""
    seen: defaultdict[str, list[str]] = defaultdict(list)

    def add(name: str, what: str) -> None:
        seen[name].append(what)

    yield add
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(written(page, seen), encoding="utf-8")
