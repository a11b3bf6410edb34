"""Frames: found in any pieces, bounded, and never guessed after a fault."""

from __future__ import annotations

import pytest
import trio.testing
from hypothesis import given, strategies as st

from trioserve.children.frames import MAX_FRAME, FrameError, FrameReader, FrameStream, framed


@given(
    payloads=st.lists(st.binary(max_size=50)),
    cuts=st.lists(st.integers(1, 40)),
    rest=st.integers(0, 3),
)
def test_frames_are_found_in_any_pieces(payloads: list[bytes], cuts: list[int], rest: int) -> None:
    data = b"".join(map(framed, payloads)) + framed(b"unfinished")[:rest]
    reader, found = FrameReader(), list[bytes]()
    for size in [*cuts, len(data)]:
        piece, data = data[:size], data[size:]
        found += reader.feed(bytearray(piece))
    assert found == payloads
    assert reader.is_partial == (rest > 0)


def test_half_a_frame_is_told() -> None:
    reader = FrameReader()
    assert reader.feed(framed(b"whole") + framed(b"half")[:-1]) == [b"whole"]
    assert reader.is_partial
    assert reader.feed(b"f") == [b"half"]
    assert not reader.is_partial


@pytest.mark.parametrize("before", [b"", framed(b"good"), framed(b"cut")[:2]])
def test_a_frame_above_the_limit_is_refused_at_its_length(before: bytes) -> None:
    reader = FrameReader(max_bytes=8)
    reader.feed(before[:2])
    with pytest.raises(FrameError, match="is too long"):
        reader.feed(before[2:] + b"\t\0\0\0")
    for _ in range(3):  # nothing after it is taken for a frame, nor held
        with pytest.raises(FrameError):
            reader.feed(framed(b"good"))


def test_garbage_is_too_long() -> None:
    with pytest.raises(FrameError, match="1,886,680,168"):
        FrameReader().feed(b"http://localhost")


def test_a_frame_of_the_most_bytes_is_taken() -> None:
    assert FrameReader(max_bytes=3).feed(framed(b"abc")) == [b"abc"]
    reader = FrameReader()
    assert reader.feed(MAX_FRAME.to_bytes(4, "little")) == []
    assert reader.is_partial


def test_frames_in_many_reads_are_not_joined_again_and_again() -> None:
    payload = bytes(60 * 2**20)
    data, reader = memoryview(framed(payload)), FrameReader()
    pieces = [reader.feed(bytes(data[i : i + 4096])) for i in range(0, len(data), 4096)]
    assert pieces.pop() == [payload]
    assert not any(pieces)
    many = FrameReader().feed(framed(b"x") * 200_000)
    assert many == [b"x"] * 200_000


async def test_frames_on_a_stream() -> None:
    one, other = trio.testing.memory_stream_pair()
    sender, receiver = FrameStream(one), FrameStream(other, max_bytes=5)
    for payload in (b"first", b"", b"third"):
        await sender.send(payload)
    await one.send_all(framed(b"half")[:-1])
    await one.send_eof()
    assert [await receiver.receive() for _ in range(4)] == [b"first", b"", b"third", None]
    await receiver.send(b"longer")
    with pytest.raises(FrameError):
        await FrameStream(one, max_bytes=5).receive()
