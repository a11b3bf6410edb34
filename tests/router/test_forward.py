"""One exchange with a child: its answer as it comes, and what becomes of the connection."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.support.unix_server import SSE_HEAD, Play, chunk, playing, send
from tests.support.waiting import patiently
from trioserve.errors import ModelProcessError
from trioserve.router import forward
from trioserve.router.forward import Kept, NotTakenError, Outgoing, connect, exchange

GET = Outgoing("GET", "/", [(b"x-a", b"b")])


def answers(*parts: bytes) -> Play:
    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await send(stream, *parts)
        await trio.sleep_forever()

    return play


def ends_after(*parts: bytes) -> Play:
    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await send(stream, *parts)

    return play


async def test_a_whole_answer() -> None:
    play = answers(b"HTTP/1.1 429 \r\nRetry-After:  3\r\ncontent-length: 5\r\n\r\nhel", b"lo")
    async with playing(play) as path, exchange(path, GET) as answer:
        assert answer.status == 429
        assert answer.headers == [(b"retry-after", b"3"), (b"content-length", b"5")]
        assert not answer.ended
        assert await answer.receive() == b"hel"
        assert await answer.receive() == b"lo"
        assert answer.ended
        assert await answer.receive() == b""


async def test_a_head_that_comes_in_parts() -> None:
    play = answers(b"HTTP/1.1 2", b"00 \r\ncontent-length: 2\r", b"\n\r", b"\nhi")
    async with playing(play) as path, exchange(path, GET) as answer:
        assert answer.status == 200
        assert await answer.receive_all() == b"hi"


async def test_chunks_that_come_together_are_given_together() -> None:
    play = answers(SSE_HEAD + chunk(b"a") + chunk(b"b" * 100), chunk(b"c") + chunk(b""))
    async with playing(play) as path, exchange(path, GET) as answer:
        assert await answer.receive() == b"a" + b"b" * 100
        assert await answer.receive() == b"c"
        assert answer.ended


@pytest.mark.system
async def test_a_chunk_is_given_once_it_is_whole() -> None:
    whole = chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n")
    play = answers(SSE_HEAD, *(whole[i : i + 1] for i in range(len(whole))), chunk(b""))
    async with playing(play) as path, exchange(path, GET) as answer:
        assert await answer.receive() == b"data: 1\n\n"
        assert await answer.receive() == b"data: 2\n\n"
        assert await answer.receive() == b""


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", b"HTTP/1.1 200 \r\ncontent-length: 100\r\n\r\n"),
        ("DELETE", b"HTTP/1.1 204 \r\ntransfer-encoding: chunked\r\n\r\n"),
        ("GET", b"HTTP/1.1 200 \r\ncontent-length: 0\r\n\r\n"),
    ],
)
async def test_an_answer_without_a_body(method: str, head: bytes) -> None:
    async with (
        playing(answers(head)) as path,
        exchange(path, Outgoing(method, "/", [])) as answer,
    ):
        assert answer.ended
        assert await answer.receive_all() == b""


async def test_what_is_sent() -> None:
    received = b""

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        nonlocal received
        received = request
        while not received.endswith(b"yyy"):
            received += await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 \r\ncontent-length: 0\r\n\r\n")

    body = b"x" * 2**21 + b"yyy"  # more than the socket holds
    async with (
        playing(play) as path,
        exchange(path, Outgoing("POST", "/a?b=c", [(b"x-a", b"b")], body)),
    ):
        pass
    assert received.endswith(b"\r\n\r\n" + body)


def test_the_head_of_a_request() -> None:
    assert GET.head() == b"GET / HTTP/1.1\r\nhost: localhost\r\nx-a: b\r\n\r\n"
    assert Outgoing("POST", "/", []).head().endswith(b"content-length: 0\r\n\r\n")


@pytest.mark.parametrize(
    "parts", [(), (b"HTTP/1.1 20",), (b"HTTP/1.1 200 \r\ncontent-length: 3\r\n",)]
)
async def test_a_child_that_ends_before_it_answers(parts: tuple[bytes, ...]) -> None:
    async with playing(ends_after(*parts)) as path:
        with pytest.raises(ModelProcessError):
            async with exchange(path, GET):
                pass


@pytest.mark.parametrize(
    "parts",
    [
        (SSE_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n")[:-3]),
        (SSE_HEAD, chunk(b"data: 1\n\n")),
        (b"HTTP/1.1 200 \r\ncontent-length: 10\r\n\r\n", b"data: 1\n\n"),
    ],
)
async def test_a_child_that_ends_in_its_answer(parts: tuple[bytes, ...]) -> None:
    async with playing(ends_after(*parts)) as path, exchange(path, GET) as answer:
        assert await answer.receive() == b"data: 1\n\n"
        with pytest.raises(ModelProcessError):
            await answer.receive()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(ModelProcessError, match="takes no requests"):
        async with exchange(tmp_path / "none.sock", GET):
            pass


@contextmanager
def listening(folder: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A child that takes connections, and reads none by itself."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "child.sock"))
        listener.listen()
        yield folder / "child.sock", listener


LONG = Outgoing("POST", "/", [], b"x" * 2**20)


@pytest.mark.parametrize("n_read", [None, 0, 100])
@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell what was not read")
async def test_a_child_that_ends_before_it_has_read_all(tmp_path: Path, n_read: int | None) -> None:
    ended = trio.Event()
    with listening(tmp_path) as (path, listener), connect(path, ended=ended) as connection:

        async def end() -> None:
            await trio.testing.wait_all_tasks_blocked(0.01)
            if n_read is not None:
                with listener.accept()[0] as accepted:
                    accepted.recv(n_read)
            listener.close()
            await trio.testing.wait_all_tasks_blocked(0.01)
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            with pytest.raises(NotTakenError):
                await connection.ask(LONG)
            assert ended.is_set()


async def test_a_child_that_closes_a_connection_and_lives_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_WORD", 0.01)
    with listening(tmp_path) as (path, listener), connect(path, ended=trio.Event()) as connection:
        listener.accept()[0].close()
        with pytest.raises(ModelProcessError) as caught:
            await connection.ask(LONG)
        assert not isinstance(caught.value, NotTakenError)


async def test_a_child_that_ends_after_it_has_read_all_may_have_done_something(
    tmp_path: Path,
) -> None:
    ended = trio.Event()
    ended.set()
    with listening(tmp_path) as (path, listener), connect(path, ended=ended) as connection:
        async with trio.open_nursery() as nursery:

            async def end() -> None:
                await trio.testing.wait_all_tasks_blocked(0.01)
                with listener.accept()[0] as accepted:
                    assert accepted.recv(2**16).endswith(b"\r\n\r\n")

            nursery.start_soon(end)
            with pytest.raises(ModelProcessError) as caught:
                await connection.ask(GET)
        assert not isinstance(caught.value, NotTakenError)


async def test_an_early_answer_to_a_long_body_is_read() -> None:
    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(b"HTTP/1.1 413 \r\ncontent-length: 2\r\n\r\nno")

    async with (
        playing(play) as path,
        exchange(path, Outgoing("POST", "/", [], b"x" * 2**22)) as answer,
    ):
        assert answer.status == 413
        assert await answer.receive_all() == b"no"


async def test_what_is_no_http_is_not_read_for_ever() -> None:
    async with playing(answers(b"x" * 2**17)) as path:
        with pytest.raises(ModelProcessError, match="no HTTP"):
            async with exchange(path, GET):
                pass


@pytest.mark.parametrize("head", [b"", SSE_HEAD])
async def test_leaving_closes_the_connection(head: bytes) -> None:
    closed = trio.Event()

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(head)
        assert await stream.receive_some() == b""
        closed.set()

    async def ask(path: Path) -> None:
        async with exchange(path, GET) as answer:
            await answer.receive()

    async with playing(play) as path:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, path)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        with patiently():
            await closed.wait()


# -- connections that are kept


def counting(connections: list[int]) -> Play:
    """Answer each request of a connection, and note of each connection how many there were."""

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        connections.append(0)
        number = len(connections) - 1
        while request:
            connections[number] += 1
            await stream.send_all(b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nhi")
            request = await stream.receive_some()

    return play


async def ask(path: Path, kept: Kept) -> None:
    async with exchange(path, GET, kept) as answer:
        assert await answer.receive_all() == b"hi"


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.close()


async def test_a_connection_is_kept_for_the_next_request(kept: Kept) -> None:
    counts: list[int] = []
    async with playing(counting(counts)) as path:
        for _ in range(3):
            await ask(path, kept)
        assert counts == [3]
        async with exchange(path, GET, kept) as answer:
            await ask(path, kept)  # meanwhile
            await answer.receive_all()
        await ask(path, kept)
        assert sorted(counts) == [1, 5]


async def test_a_connection_is_not_kept_for_long(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    async with playing(counting(counts)) as path:
        await ask(path, kept)
        monkeypatch.setattr(forward, "_KEEP", 0.0)
        await ask(path, kept)
        assert counts == [1, 1]


async def test_only_some_connections_are_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_MAX_KEPT", 2)
    counts: list[int] = []
    async with playing(counting(counts)) as path:
        for _ in range(2):
            async with AsyncExitStack() as stack:
                for _ in range(4):
                    answer = await stack.enter_async_context(exchange(path, GET, kept))
                    await answer.receive_all()
        assert sorted(counts) == [1, 1, 1, 1, 2, 2]


async def test_a_connection_that_is_not_at_rest_is_not_kept(kept: Kept) -> None:
    counts: list[int] = []
    async with playing(counting(counts)) as path:
        async with exchange(path, GET, kept):
            pass  # the body was not received
        with pytest.raises(ZeroDivisionError):
            async with exchange(path, GET, kept) as answer:
                await answer.receive_all()
                raise ZeroDivisionError
        await ask(path, kept)
        assert counts == [1, 1, 1]


async def test_a_connection_that_the_child_has_closed_is_not_used(kept: Kept) -> None:
    play = ends_after(b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nhi")
    async with playing(play) as path:
        for _ in range(2):
            await ask(path, kept)
            await trio.testing.wait_all_tasks_blocked(0.02)


async def test_nothing_is_kept_of_a_child_that_has_ended(kept: Kept) -> None:
    counts: list[int] = []
    async with playing(counting(counts)) as path:
        kept.close()
        await ask(path, kept)
        await ask(path, kept)
        assert counts == [1, 1]
