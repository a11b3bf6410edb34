"""Outputs that end by their indentation."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trioserve.engine.detokenizer import IndentStop

PIECES = st.lists(st.text(" \t\nab", max_size=5), max_size=12)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("return x", "return x"),  # the first line is the prompt's
        ("a\n    b\n    c", "a\n    b\n    c"),
        ("a\n    b\n  c", "a\n    b\n  "),
        ("a\n   b", "a\n   "),
        ("a\n\t\t\t\tb", "a\n\t\t\t\tb"),
        ("a\n    b\n\n    c", "a\n    b\n"),
        ("a\n      b", "a\n      b"),
        ("a\nb", "a\n"),
    ],
)
def test_a_line_with_too_few_blanks_ends_it(text: str, kept: str) -> None:
    stop = IndentStop(4)
    assert stop.cut(text) == kept
    assert stop.ended == (kept != text)


@given(PIECES, st.integers(1, 3))
def test_it_does_not_matter_how_the_text_is_split(pieces: list[str], least: int) -> None:
    whole, split = IndentStop(least), IndentStop(least)
    expected = whole.cut("".join(pieces))
    kept = ""
    for piece in pieces:
        kept += split.cut(piece)
        if split.ended:
            break
    assert (kept, split.ended) == (expected, whole.ended)
