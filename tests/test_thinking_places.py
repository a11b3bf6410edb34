"""Where in an answer a tag begins thinking, in text that comes in pieces."""

from __future__ import annotations

import pytest

from trioserve.thinking import ThinkingPlaces


@pytest.mark.parametrize(
    ("before", "after", "thought", "counts"),
    [
        ("", "", False, True),
        ("Hi\n  ", "", False, True),
        ("Hi ", "so", False, False),
        ("Hi ", "so", True, True),
        ("Hi ", "\n", True, True),
        ("Hi ", " and", True, False),
        ("Hi ", "", True, None),
        ("`", "so", True, False),
        ("```\n", "so", True, False),
        ("```", "so", True, False),
        ("```\nx\n  ```\n", "so", False, True),
    ],
)
@pytest.mark.parametrize("length", [1, 99])
def test_where_a_tag_counts(
    before: str, after: str, thought: bool, counts: bool | None, length: int
) -> None:
    places = ThinkingPlaces("<think>")
    if thought:
        places.end_thinking()
    for start in range(0, len(before), length):
        places.add(before[start : start + length])
        places.allow("x", final=False)  # a question changes nothing
    assert places.allow(after, final=False) is counts
    assert places.allow(after, final=True) is bool(counts)
    assert ThinkingPlaces("[THINK]").allow(after, final=False)
