"""What all tests share: assertions in `tests.support` explain themselves as those of tests do."""

import pytest

pytest.register_assert_rewrite("tests.support")
