"""`Lines`: found in any pieces, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trioserve.children.lines import LineReader, Lines, LineTooLongError


@given(st.lists(st.binary(max_size=20)))
def test_lines_are_those_of_all_that_was_fed(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)]
    assert [*found, lines.rest] == b"".join(pieces).split(b"\n")


@given(pieces=st.lists(st.binary(max_size=20)), most=st.integers(1, 9))
def test_a_longer_line_is_cut(pieces: list[bytes], most: int) -> None:
    lines = Lines(most, cut=True)
    found = [line for piece in pieces for line in lines.feed(piece)]
    assert all(len(line) <= most for line in [*found, lines.rest])
    assert b"".join([*found, lines.rest]) == b"".join(pieces).replace(b"\n", b"")


def test_a_longer_line_is_refused_after_those_before_it() -> None:
    lines = Lines(4)
    lines.feed(b"good\nlonger\ngood\n")
    assert lines.take() == b"good"
    for _ in range(2):
        with pytest.raises(LineTooLongError):
            lines.take()


def test_a_line_is_refused_before_its_end() -> None:
    with pytest.raises(LineTooLongError):
        list(Lines(4).feed(b"12345"))


def test_a_long_line_without_an_end_is_searched_once() -> None:
    piece, lines = b"x" * 4096, Lines()
    for _ in range(60 * 2**20 // len(piece)):
        lines.feed(piece)
        assert lines.take() is None
    assert lines.take() is None
    cut = Lines(64, cut=True)
    assert sum(map(len, cut.feed(b"x" * 2**24))) + len(cut.rest) == 2**24


class Pieces:
    """A stream that gives these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = iter(pieces)

    async def receive_some(self, max_bytes: int) -> bytes:
        """The next piece."""
        return next(self._pieces, b"")


async def test_a_reader_takes_lines_from_a_stream() -> None:
    reader = LineReader(Pieces(b"one\ntw", b"o\n\nthr", b"ee"), 5)
    assert [await reader.next() for _ in range(4)] == [b"one", b"two", b"", None]


async def test_a_reader_refuses_a_long_line() -> None:
    reader = LineReader(Pieces(b"one\nt", b"hirteen"), 5)
    assert await reader.next() == b"one"
    with pytest.raises(LineTooLongError):
        await reader.next()
