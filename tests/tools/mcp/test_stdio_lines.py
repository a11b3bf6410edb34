"""Lines, and how many of them there may be in a second."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st

from trioserve.tools.mcp.messages import Pace
from trioserve.tools.process import LineReader, LineTooLongError


class Pieces(trio.abc.ReceiveStream):
    """A stream of these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._pieces.pop(0) if self._pieces else b""

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def lines_of(pieces: list[bytes], max_bytes: int) -> list[bytes]:
    reader, lines = LineReader(Pieces(pieces), max_bytes), []
    while (line := await reader.next()) is not None:
        lines.append(line)
    return lines


@given(st.lists(st.binary(min_size=1, max_size=5).map(lambda data: data.replace(b"a", b"\n"))))
def test_lines_are_the_same_however_they_come(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert trio.run(lines_of, pieces, 1000) == whole.split(b"\n")[:-1]


async def test_a_line_that_is_too_long() -> None:
    assert await lines_of([b"x" * 60, b"y" * 40 + b"\n"], 100) == [b"x" * 60 + b"y" * 40]
    with pytest.raises(LineTooLongError):
        await lines_of([b"ok\n", b"x" * 60, b"y" * 41, b"\n"], 100)


async def test_a_pace(autojump_clock: trio.testing.MockClock) -> None:
    pace, start = Pace(10), trio.current_time()
    for _ in range(10):
        await pace.step()
    assert trio.current_time() == start
    for _ in range(10):
        await pace.step()
    assert trio.current_time() - start == pytest.approx(1)
    await trio.sleep(100)  # what was not used is not saved for later
    for _ in range(30):
        await pace.step()
    assert trio.current_time() - start == pytest.approx(103)
