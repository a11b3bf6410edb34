"""What clients send over a connection, and that it ends their connection at most."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
import trio
from hypercorn.events import RawData, Updated
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from tests.support.attacks import ATTACKS, PREFACE, WEBSOCKET, answer_to, send_all_mutated
from tests.support.http_server import connected, post, serving_script
from tests.support.waiting import patiently, until
from trioserve.api.base.service import Service
from trioserve.api.base.tcp import TCPConnection

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def unharmed(**fields: object) -> AsyncIterator[tuple[str, Service]]:
    """Serve; at the end, the server answers and has no connection left but the one that asks."""
    with patiently():
        async with serving_script(**fields) as (url, service):
            yield url, service
            async with httpx.AsyncClient(base_url=url) as client:
                answer = await client.get("/health")
                assert answer.status_code == 200
                while service.n_connections > 1:
                    await trio.sleep(0.01)


@pytest.mark.system
@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS)
async def test_an_attack_ends_its_connection_alone(data: bytes) -> None:
    async with unharmed() as (url, _):
        for _ in range(3):
            await answer_to(url, data)


@pytest.mark.system
async def test_upgrades_are_not_taken_up() -> None:
    async with unharmed() as (url, _):
        for data in (WEBSOCKET, ATTACKS["h2c with settings that are none"]):
            assert (await answer_to(url, data)).startswith(b"HTTP/1.1 200 ")
        assert (await answer_to(url, PREFACE)).startswith(b"HTTP/1.1 400 ")


TWO_LENGTHS = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH
)


async def test_a_request_that_can_be_read_in_two_ways_is_refused() -> None:
    async with unharmed() as (url, _):
        for data in (
            TWO_LENGTHS,
            b"GET ?a HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http://[/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ):
            answer = await answer_to(url, data)
            assert answer.startswith(b"HTTP/1.1 400 "), data
            assert answer.count(b"HTTP/1.1") == 1
            assert b'"type":"invalid_request_error"' in answer


async def test_an_upload_that_goes_on_after_its_refusal() -> None:
    async with unharmed(api_keys=("right",)) as (url, _), connected(url) as stream:
        head = post("/v1/chat/completions", b"", "Authorization: Bearer wrong")
        await stream.send_all(head.replace(b"Content-Length: 0", b"Content-Length: 90000000"))
        assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 401 ")
        with trio.move_on_after(5):
            try:
                while True:
                    await stream.send_all(bytes(65536))
            except trio.BrokenResourceError:
                pass


async def test_the_descriptor_is_closed_with_the_client() -> None:
    async with unharmed(keep_alive_timeout=600.0) as (url, service):
        for _ in range(5):
            async with connected(url) as stream:
                await stream.send_all(HEALTH)
                await stream.receive_some(65536)
        await until(lambda: not service.n_connections)


@pytest.mark.system
async def test_too_many_connections_are_told_so() -> None:
    async with serving_script(max_connections=2) as (url, service):
        async with connected(url), connected(url):
            while service.n_connections < 2:
                await trio.sleep(0.01)
            answer = await answer_to(url, HEALTH)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After" in answer
        while service.n_connections:
            await trio.sleep(0.01)
        assert (await answer_to(url, HEALTH)).startswith(b"HTTP/1.1 200 ")


async def test_an_error_in_a_connection_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_arguments: object) -> None:
        raise RuntimeError("nobody expected this")

    async with unharmed() as (url, _):
        with monkeypatch.context() as patching, capture_logs() as lines:
            patching.setattr("trioserve.api.base.tcp.HTTP1.handle", fail)
            await answer_to(url, b"GET / HTTP/1.1\r\n\r\n")
        (line,) = (line for line in lines if line["event"] == "connection failed")
        assert "nobody expected this" in line["error"]


async def test_an_answer_that_comes_while_the_connection_is_being_closed() -> None:
    for _ in range(30):  # Trio runs tasks in any order
        ours, theirs = (trio.SocketStream(each) for each in trio.socket.socketpair())
        async with ours, theirs, trio.open_nursery() as nursery:
            connection = TCPConnection(Mock(app=None), Mock(), Mock(), Mock(), ours)
            connection.protocol = Mock(handle=AsyncMock())
            nursery.start_soon(connection.protocol_send, RawData(b"an answer"))
            nursery.start_soon(connection._close)


async def test_a_stream_over_http_1_0_has_no_chunks() -> None:
    async with serving_script() as (url, _):
        body = b'{"prompt": "a", "n_predict": 2, "stream": true}'
        request = post("/completion", body).replace(b"HTTP/1.1", b"HTTP/1.0")
        answer = await answer_to(url, request)
        _, _, events = answer.partition(b"\r\n\r\n")
        assert events.startswith(b"data: {")
        assert events.endswith(b"}\n\n")


async def test_what_the_system_does_not_take_at_once_is_sent_in_parts() -> None:
    ours, theirs = (trio.SocketStream(each) for each in trio.socket.socketpair())
    long = bytes(range(256)) * 2**14
    received = b""
    async with ours, theirs, trio.open_nursery() as nursery:
        connection = TCPConnection(Mock(app=None), Mock(), Mock(), Mock(), ours)
        nursery.start_soon(connection.protocol_send, RawData(long))
        await wait_all_tasks_blocked()
        nursery.start_soon(connection.protocol_send, RawData(b"the end"))
        while len(received) < len(long) + 7:
            received += await theirs.receive_some()
    assert received == long + b"the end"


async def test_a_response_that_ends_after_its_client_has_gone_keeps_nothing_open() -> None:
    ours, theirs = (trio.SocketStream(each) for each in trio.socket.socketpair())
    async with ours, theirs:
        connection = TCPConnection(Mock(app=None), Mock(read_timeout=None), Mock(), Mock(), ours)
        connection.protocol = Mock(handle=AsyncMock())
        connection.idle_task = Mock(restart=AsyncMock(), stop=AsyncMock())
        await theirs.aclose()
        await connection._read_data()
        await connection.protocol_send(Updated(idle=True))
    connection.idle_task.restart.assert_not_called()


@pytest.mark.system
async def test_mutated_requests() -> None:
    async with unharmed() as (url, _):
        statuses = await send_all_mutated(url, range(300))
    assert 400 in statuses
    assert not [status for status in statuses if status >= 500 and status != 501]
