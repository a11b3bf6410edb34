"""Passages of a page."""

from __future__ import annotations

from trioserve.tools.web.tools import _passages


def test_words_are_found_behind_letters_that_are_longer_in_lower_case() -> None:
    text = "İ" * 2000 + " İSTANBUL " + "x" * 2000
    shown = _passages(text, "istanbul", 40_000)
    assert "İSTANBUL" in shown and len(shown) < 1300
    assert _passages(text, "ankara", 40_000) == "[the page does not have this text]"
