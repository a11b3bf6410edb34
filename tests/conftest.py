"""What all tests share: assertions in `tests.support` explain themselves as those of tests do."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")

# Whoever runs the tests may have models of the hub, which would make of `trioserve` a router.
os.environ["HF_HUB_CACHE"] = str(Path(__file__).parent / "no-cache")


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    """Put the root logger back, so that no test sees the log that another one has set up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
