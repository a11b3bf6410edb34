"""What all tests share: assertions in `tests.support` explain themselves as those of tests do."""

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")

# Whoever runs the tests may have models of the hub, which would make of `trioserve` a router.
os.environ["HF_HUB_CACHE"] = str(Path(__file__).parent / "no-cache")
