"""Texts of windows are joined as one text."""

from __future__ import annotations

import pytest

from trioserve.server.transcription.model import Joiner


def joined(*windows: list[str]) -> list[str]:
    """The texts of windows that have these pieces, as they are reported."""
    joiner, told = Joiner(), []
    for pieces in windows:
        joiner.next_window()
        told += [joiner.feed(piece) for piece in pieces]
    return told


def test_white_space_around_windows_becomes_one_space() -> None:
    told = joined([" One", " two", ".", "\n", " "], [" ", "", "Three "], ["\n"], [" four\nfive"])
    assert "".join(told) == "One two. Three four\nfive"
    assert told[3:7] == ["", "", "", ""]  # white space waits for what follows


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        ("你好。", "再见。", "你好。再见。"),
        ("こんにちは", "Zoë", "こんにちはZoë"),
        ("안녕하세요.", "잘 가요.", "안녕하세요. 잘 가요."),
        ("Привет.", "Пока.", "Привет. Пока."),
        ("", "One", "One"),
        ("One", "", "One"),
    ],
)
def test_scripts_without_spaces_get_none(first: str, second: str, whole: str) -> None:
    assert "".join(joined([first], [second])) == whole
