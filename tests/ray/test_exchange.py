import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.unix_server import SSE_HEAD, chunk
from trioserve.errors import ModelProcessError
from trioserve.ray.replica import exchange
from trioserve.router.forward import NotTakenError, Outgoing

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

REQUEST = Outgoing("POST", "/completion", [(b"x-a", b"1")], b"{}")


def with_server(tmp_path: Path, play: Play, use: Callable[[Path], Awaitable[None]]) -> None:
    """Use a server on a Unix socket that answers each connection as `play` does."""

    async def run() -> None:
        path = tmp_path / "x.sock"
        played = asyncio.Event()

        async def answer(reader, writer) -> None:
            await play(reader, writer)
            with suppress(OSError):
                await writer.wait_closed()
            played.set()

        server = await asyncio.start_unix_server(answer, path)
        async with server, asyncio.timeout(10):
            await use(path)
            await played.wait()

    asyncio.run(run())


def test_a_whole_answer_is_received(tmp_path) -> None:
    heads = []

    async def play(reader, writer) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2))
        writer.write(b"HTTP/1.1 201 \r\nX-B: 2\r\ncontent-length: 4\r\n\r\nab")
        await writer.drain()
        writer.write(b"cd")
        writer.close()

    async def use(path: Path) -> None:
        async with exchange(path, REQUEST) as answer:
            assert (answer.status, answer.header(b"x-b")) == (201, b"2")
            assert await answer.receive_all() == b"abcd"
            assert answer.ended

    with_server(tmp_path, play, use)
    assert heads[0].startswith(b"POST /completion HTTP/1.1\r\n")
    assert b"x-a: 1\r\ncontent-length: 2\r\n\r\n{}" in heads[0]


def test_events_come_when_they_are_there_and_together_when_several_are(tmp_path) -> None:
    go_on = asyncio.Event()

    async def play(reader, writer) -> None:
        writer.write(SSE_HEAD + chunk(b"one") + chunk(b"two")[:3])
        await go_on.wait()
        writer.write(chunk(b"two")[3:] + chunk(b"three") + b"0\r\n\r\n")
        writer.close()

    async def use(path: Path) -> None:
        async with exchange(path, REQUEST) as answer:
            assert await answer.receive() == b"one"
            go_on.set()
            assert await answer.receive() == b"twothree"
            assert await answer.receive() == b""

    with_server(tmp_path, play, use)


def test_leaving_closes_the_connection(tmp_path) -> None:
    closed = asyncio.Event()

    async def play(reader, writer) -> None:
        writer.write(SSE_HEAD + chunk(b"one"))
        await reader.read()  # until the end
        closed.set()
        writer.close()

    async def use(path: Path) -> None:
        async def stay() -> None:
            async with exchange(path, REQUEST) as answer:
                await answer.receive()
                left.set()
                await answer.receive()

        left = asyncio.Event()
        task = asyncio.create_task(stay())
        await left.wait()
        task.cancel()
        await closed.wait()

    with_server(tmp_path, play, use)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 \r\n", SSE_HEAD + b"3\r\non"], ids=len)
def test_a_child_that_ends_too_early_is_an_error(tmp_path, sent) -> None:
    async def play(reader, writer) -> None:
        writer.write(sent)
        writer.close()

    async def use(path: Path) -> None:
        with pytest.raises(ModelProcessError) as raised:
            async with exchange(path, REQUEST) as answer:
                await answer.receive_all()
        assert not isinstance(raised.value, NotTakenError)

    with_server(tmp_path, play, use)


def test_where_nobody_listens_nothing_was_sent(tmp_path) -> None:
    async def use() -> None:
        async with exchange(tmp_path / "none.sock", REQUEST):
            raise AssertionError

    with pytest.raises(NotTakenError):
        asyncio.run(use())
