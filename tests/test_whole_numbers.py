"""One reader of whole numbers for headers, queries, paths and files."""

from __future__ import annotations

import pytest

from trioserve.whole_numbers import whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), (b"12", 12), (str(2**63 - 1), 2**63 - 1), (str(2**63), None)]
    + [(text, None) for text in ("", "-1", "+1", " 1", "1\n", "1_0", "1.0", "²", "٣", "9" * 5000)]
    + [(b"\xb2", None), (b"", None)],
)
def test_only_decimal_digits_are_a_number(text: str | bytes, number: int | None) -> None:
    assert whole_number(text) == number


def test_a_number_out_of_bounds_is_none() -> None:
    assert [whole_number(text, least=2, most=4) for text in "12345"] == [None, 2, 3, 4, None]
