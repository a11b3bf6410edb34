"""Frames: found in any pieces, bounded, and never guessed after a fault."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st

from trioserve.children.frames import (
    MAX_FRAME,
    FrameError,
    FrameReader,
    FrameStream,
    framed,
    receive,
)


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


@pytest.mark.parametrize("before", [b"", framed(b"good"), framed(b"cut")[:2]])
def test_a_frame_above_the_limit_is_refused_at_its_length(before: bytes) -> None:
    reader = FrameReader(max_bytes=8)
    reader.feed(before[:2])
    with pytest.raises(FrameError, match="is too long"):
        reader.feed(before[2:] + b"\t\0\0\0")
    for _ in range(3):  # nothing after it is taken for a frame, nor held
        with pytest.raises(FrameError):
            reader.feed(framed(b"good"))


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
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = FrameStream(one), FrameStream(other, max_bytes=5)
        for payload in (b"first", b"", b"third"):
            assert await sender.send(payload)
        one.sendall(framed(b"half")[:-1])
        one.shutdown(socket.SHUT_WR)
        assert [await receiver.receive() for _ in range(4)] == [b"first", b"", b"third", None]
        await receiver.send(b"longer")
        with pytest.raises(FrameError):
            await FrameStream(one, max_bytes=5).receive()


async def test_a_stream_whose_other_side_has_gone() -> None:
    one, other = socket.socketpair()
    stream = FrameStream(one)
    other.send(b"left unread")
    stream_of_other = FrameStream(other)
    await stream.send(b"")
    stream_of_other.close()
    stream_of_other.close()
    assert not await stream.send(b"")
    assert await receive(one) == b"left unread"
    assert await stream.receive() is None
    stream.close()


async def test_a_task_that_waits_learns_that_a_stream_was_closed() -> None:
    one, other = socket.socketpair()
    stream = FrameStream(one)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raises_closed, stream.receive)
        await trio.testing.wait_all_tasks_blocked()
        stream.close()
    other.close()


async def raises_closed(call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(trio.ClosedResourceError):
        await call()


async def test_what_a_full_socket_does_not_take_is_sent_as_it_is_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = FrameStream(one), FrameStream(other)
        payload = bytes(10 * 2**20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, payload)
            assert await receiver.receive() == payload
