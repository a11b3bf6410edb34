"""Connections of real and of hostile clients. Bad input ends its own connection at most."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
import trio
import trio.testing
import trustme
from hypercorn.events import RawData, Updated
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.attacks import ATTACKS, PREFACE, WEBSOCKET, answer_to, attack, send_all_mutated
from tests.support.http_server import (
    chunks_of,
    connected,
    post,
    serving,
    serving_script,
    slots_in_use,
)
from tests.support.scripts import endless
from tests.support.waiting import patiently, until
from trioserve.api import connections
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Pieces, Reply
from trioserve.api.base.routes import Query, Route
from trioserve.api.connections import GRACE, NAME, Connections
from trioserve.api.edge import connection as requests, tcp
from trioserve.api.edge.tcp import Reset, TCPConnection
from trioserve.api.service import Service
from trioserve.app import create_app
from trioserve.concurrency import TURN
from trioserve.config import Config
from trioserve.errors import UnavailableError
from trioserve.testing import ScriptedBackend, scripted


def connection_on(stream: trio.abc.Stream, stall_timeout: float = 10) -> TCPConnection:
    """A connection of an app, without its protocol."""
    app = Mock(app=Mock(extensions={NAME: Mock(config=Config(stall_timeout=stall_timeout))}))
    return TCPConnection(
        app, Mock(read_timeout=None, keep_alive_timeout=60.0), Mock(), Mock(), stream
    )


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = HEALTH[:-2] + b"Connection: close\r\n\r\n"


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
            await attack(url, data)


@pytest.mark.system
async def test_upgrades_are_not_taken_up() -> None:
    async with unharmed() as (url, _):
        for data in (WEBSOCKET, ATTACKS["h2c with invalid settings"]):
            asked = data.replace(b": Upgrade\r", b": Upgrade, close\r")
            assert (await answer_to(url, asked)).startswith(b"HTTP/1.1 200 ")
        assert (await answer_to(url, PREFACE)).startswith(b"HTTP/1.1 400 ")


TWO_LENGTHS = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH
)


async def test_a_request_that_can_be_read_in_two_ways_or_not_at_all_is_refused() -> None:
    async with unharmed() as (url, _):
        for data in (
            TWO_LENGTHS,
            b"GET /health HTTP/1.1\r\nno colon\r\n\r\n" + HEALTH,
            b"GET ?a HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http://[/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /health HTTP/1.1\nHost: localhost\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\n\n",
        ):
            answer = await answer_to(url, data)
            assert answer.startswith(b"HTTP/1.1 400 "), data
            assert answer.count(b"HTTP/1.1") == 1
            assert b'"type":"invalid_request_error"' in answer


async def test_a_bare_lf_behind_another_request_ends_the_connection_after_its_answer() -> None:
    async with unharmed() as (url, _):
        for data in (
            HEALTH + b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
            post("/tokenize", b'{"content":\n"a"}\n') + b"GET /health HTTP/1.1\nHost: a\r\n\r\n",
        ):
            answer = await answer_to(url, data)
            assert answer.count(b"HTTP/1.1 ") == 2
            assert answer.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 400 " in answer


async def test_a_target_may_name_the_server() -> None:
    head = b"GET http://LOCALHOST:80/health HTTP/1.1\r\nHost: localhost:80\r\n"
    async with unharmed() as (url, _):
        answer = await answer_to(url, head + b"Connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")


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


STREAM = post("/completion", b'{"prompt": "a", "stream": true}')


@pytest.mark.system
async def test_too_many_connections_are_told_so() -> None:
    async with serving_script(endless(), max_connections=2) as (url, service):
        async with chunks_of(url, STREAM), chunks_of(url, STREAM):
            answer = await answer_to(url, HEALTH)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After" in answer
        await until(lambda: not service.n_connections)
        assert (await answer_to(url, LAST)).startswith(b"HTTP/1.1 200 ")


HALF = b"GET /health HTTP/1.1\r\nHost: local"
HALF_BODY = post("/completion", b"x" * 100)[:-50]


@pytest.mark.system
@pytest.mark.parametrize("sent", [b"", HALF, HALF_BODY, HEALTH + HALF], ids=repr)
async def test_connections_that_wait_for_their_clients_make_room(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "GRACE", 0.0)
    async with (
        serving_script(endless(), max_connections=2) as (url, service),
        chunks_of(url, STREAM) as next_chunk,
        connected(url) as first,
    ):
        await first.send_all(sent)
        if sent.startswith(HEALTH):
            assert (await first.receive_some()).startswith(b"HTTP/1.1 200 ")
        await until(lambda: service.n_connections == 2)
        assert (await answer_to(url, LAST)).startswith(b"HTTP/1.1 200 ")
        with patiently():
            while await first.receive_some():
                pass  # it is closed, and the stream is not
        assert await next_chunk()


async def test_the_address_with_most_connections_loses_those_that_wait_longest(
    mock_clock: trio.testing.MockClock,
) -> None:
    places = Connections(Config())
    with ExitStack() as stack:

        def connect(address: str) -> trio.CancelScope:
            return stack.enter_context(places.connection(address, 6))

        few = connect("few")
        many = [connect("many") for _ in range(5)]
        places.waits("many", many[0])  # it was idle, and has had a request meanwhile
        places.is_served("many", many[2])
        for closed in (1, 3, 4, 0):
            assert not many[closed].cancel_called
            places.is_served("new", connect("new"))
            assert many[closed].cancel_called
        also_few = connect("also few")
        assert few.cancel_called  # the others are busy
        with pytest.raises(UnavailableError):
            connect("also few")
        assert not also_few.cancel_called  # its first request may be on its way
        mock_clock.jump(GRACE)
        places.is_served("also few", connect("also few"))
        assert also_few.cancel_called
        with pytest.raises(UnavailableError):
            connect("third")
        assert not many[2].cancel_called
        stack.close()
    assert places.n_connections == 0
    assert not places._n_of
    assert not places._waiting


@pytest.mark.system
@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "second"])
async def test_a_head_has_little_time_to_arrive(
    monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(tcp, "HEAD_SECONDS", 0.3)
    async with unharmed() as (url, _), connected(url) as stream:
        if before:
            await stream.send_all(before)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
            await trio.sleep(0.6)  # an idle connection stays
        await stream.send_all(HALF)
        with patiently():
            assert await stream.receive_some() == b""


async def test_a_request_that_comes_as_a_turn_of_the_wait_ends(autojump_clock: MockClock) -> None:
    async def ask() -> None:
        await trio.sleep(TURN)
        await connection.protocol_send(Updated(idle=False))

    for _ in range(30):  # Trio runs tasks in any order
        connection = connection_on(Mock(aclose=AsyncMock()))
        connection.context.terminated.wait = trio.sleep_forever  # type: ignore[method-assign]
        connection.protocol = Mock(handle=AsyncMock())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            with trio.move_on_after(3600) as scope:
                await connection._idle_timeout()
        assert scope.cancelled_caught  # it lasts as long as its answer


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", "-"),
        ("unix", "unix"),
    ],
)
def test_an_address_stands_for_a_client(address: str, network: str) -> None:
    assert requests.network_of(address) == network


async def test_an_error_in_a_connection_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_arguments: object) -> None:
        raise RuntimeError("a defect")

    async with unharmed() as (url, _):
        with monkeypatch.context() as patching, capture_logs() as lines:
            patching.setattr("trioserve.api.edge.tcp.HTTP1.handle", fail)
            await answer_to(url, b"GET / HTTP/1.1\r\n\r\n")
        (line,) = (line for line in lines if line["event"] == "connection failed")
        assert "a defect" in line["error"]


async def test_an_answer_that_comes_while_the_connection_is_being_closed() -> None:
    for _ in range(30):  # Trio runs tasks in any order
        ours, theirs = (trio.SocketStream(each) for each in trio.socket.socketpair())
        async with ours, theirs, trio.open_nursery() as nursery:
            connection = connection_on(ours)
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


async def test_a_partial_send_is_continued() -> None:
    ours, theirs = (trio.SocketStream(each) for each in trio.socket.socketpair())
    long = bytes(range(256)) * 2**14
    received = b""
    async with ours, theirs, trio.open_nursery() as nursery:
        connection = connection_on(ours)
        nursery.start_soon(connection.protocol_send, RawData(long))
        await wait_all_tasks_blocked()
        nursery.start_soon(connection.protocol_send, RawData(b"the end"))
        while len(received) < len(long) + 7:
            received += await theirs.receive_some()
    assert received == long + b"the end"


async def test_a_response_that_ends_after_its_client_has_gone_keeps_nothing_open() -> None:
    ours, theirs = (trio.SocketStream(each) for each in trio.socket.socketpair())
    async with ours, theirs:
        connection = connection_on(ours)
        connection.protocol = Mock(handle=AsyncMock())
        connection.idle_task = Mock(restart=AsyncMock(), stop=AsyncMock())
        await theirs.aclose()
        await connection._read_data()
        await connection.protocol_send(Updated(idle=True))
    connection.idle_task.restart.assert_not_called()


# -- clients that do not read


@asynccontextmanager
async def unread(
    *, stall_timeout: float = 10, is_secure: bool = False
) -> AsyncIterator[tuple[TCPConnection, list[object], trio.abc.Stream]]:
    """A connection, the events that its protocol gets, and the client's end of it."""
    events: list[object] = []

    async def handle(event: object) -> None:
        events.append(event)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    theirs = await trio.testing.open_stream_to_socket_listener(listener)
    async with listener, await listener.accept() as ours, theirs:
        ends = await encrypted(ours, theirs) if is_secure else (ours, theirs)
        connection = connection_on(ends[0], stall_timeout)
        connection.protocol = Mock(handle=handle)
        yield connection, events, ends[1]


async def encrypted(
    server: trio.SocketStream, client: trio.SocketStream
) -> tuple[trio.SSLStream[trio.SocketStream], trio.SSLStream[trio.SocketStream]]:
    authority = trustme.CA()
    known, trusting = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(),
    )
    authority.issue_cert("localhost").configure_cert(known)
    authority.configure_trust(trusting)
    ours = trio.SSLStream(server, known, server_side=True)
    theirs = trio.SSLStream(client, trusting, server_hostname="localhost")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.do_handshake)
        nursery.start_soon(theirs.do_handshake)
    return ours, theirs


@pytest.mark.parametrize("is_secure", [False, True])
async def test_a_client_that_stops_reading_gets_a_reset(
    is_secure: bool, autojump_clock: MockClock
) -> None:
    with capture_logs() as logs:
        async with unread(is_secure=is_secure) as (connection, events, theirs):
            await connection.protocol_send(RawData(bytes(2**24)))
            assert trio.current_time() == 20
            assert [type(event) for event in events] == [Reset]
            with pytest.raises(trio.BrokenResourceError):
                while await theirs.receive_some():
                    pass
    assert [line["event"] for line in logs] == ["client stopped reading"]


async def test_a_pause_of_the_server_cuts_off_no_client(mock_clock: MockClock) -> None:
    received = 0
    async with unread() as (connection, events, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(connection.protocol_send, RawData(bytes(2**24)))
        for _ in range(3):
            await wait_all_tasks_blocked()
            mock_clock.jump(3600)
        while received < 2**24:
            received += len(await theirs.receive_some())
    assert events == []


@pytest.mark.parametrize("is_secure", [False, True])
async def test_a_send_ends_at_once_when_its_request_is_cancelled(is_secure: bool) -> None:
    async with unread(stall_timeout=1e6, is_secure=is_secure) as (connection, _, theirs):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.protocol_send, RawData(bytes(2**24)))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with pytest.raises(trio.BrokenResourceError):  # a part of a message must not be the last
            while await theirs.receive_some():
                pass


@asynccontextmanager
async def serving_body(make: Any, **config: object) -> AsyncIterator[str]:
    """Serve ``GET /body``, whose body `make` returns."""
    app = create_app(Config(**config), load=scripted(ScriptedBackend()))

    async def answer(query: Query, caller: Caller, service: Service) -> Reply:
        return Pieces(pieces=make(), content_type="text/plain")

    route = Route("GET", "/body", answer)
    app.serve(route, app.state.answer_of(route))
    async with serving(app) as url:
        await app.extensions[NAME].wait_loaded()
        yield url


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_body_that_raises_breaks_the_response_off(version: bytes) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"a part"
        raise UnavailableError("The rest is not available.")

    with capture_logs() as logs, patiently():
        async with serving_body(body) as url, connected(url) as stream:
            await stream.send_all(b"GET /body HTTP/%b\r\nHost: localhost\r\n\r\n" % version)
            received = b""
            with pytest.raises(trio.BrokenResourceError):  # not an end of file
                while part := await stream.receive_some():
                    received += part
    assert received.startswith(b"HTTP/1.1 200")
    assert "The rest is not available." in [line.get("error") for line in logs]


# -- requests that wait behind another


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_client_that_leaves_while_its_next_requests_wait(is_reset: bool) -> None:
    body = b'{"prompt": "go", "stream": true}'
    async with serving_script(endless()) as (url, service):
        async with connected(url) as stream:
            await stream.send_all(post("/completion", body) + HEALTH * 3)
            await stream.receive_some()
            await until(lambda: len(service.server.lifecycle.services.dispatcher) == 1)
            if is_reset:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        async def is_free() -> bool:
            return not await slots_in_use(service)

        await until(is_free)
        await until(lambda: not service.n_connections)
        assert not [1 for route, _ in service.n_answers if route == "/health"]


async def test_requests_behind_another_are_answered_in_their_order() -> None:
    asked = [post("/tokenize", b'{"content": "%c"}' % letter) for letter in b"abcdefgh"]
    async with serving_script() as (url, _), connected(url) as stream:
        await stream.send_all(b"".join(asked))
        answers = b""
        with patiently():
            while answers.count(b"tokens") < len(asked):
                answers += await stream.receive_some()
        tokens = [b'{"tokens":[%d]}' % letter for letter in b"abcdefgh"]
        assert [answers.find(each) for each in tokens] == sorted(map(answers.find, tokens))
        assert -1 not in map(answers.find, tokens)
        await stream.send_all(HEALTH)  # the connection stays open
        assert b" 200 " in await stream.receive_some()


@pytest.mark.parametrize(
    "behind", [HEALTH * 17, post("/tokenize", bytes(300_000))], ids=["many", "long"]
)
async def test_too_much_behind_a_request_is_dropped(behind: bytes) -> None:
    may_end = trio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"a part"
        await may_end.wait()
        yield b" and the end"

    async with serving_body(body) as url, connected(url) as stream:
        await stream.send_all(HEALTH.replace(b"health", b"body") + behind)
        received = await stream.receive_some()
        await wait_all_tasks_blocked()
        may_end.set()
        with patiently():
            async for part in stream:  # ends because the server closes
                received += part
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.endswith(b" and the end\r\n0\r\n\r\n")


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_a_body_in_tiny_chunks_is_refused() -> None:
    async with unharmed() as (url, _), connected(url) as stream:
        await stream.send_all(CHUNKED + b"1\r\n \r\n" * 4097)
        received = b""
        with patiently():
            async for part in stream:
                received += part
        assert received.startswith(b"HTTP/1.1 400 ")
        assert b"4096 chunks, of less than 16 bytes on average" in received


async def test_chunks_are_handed_over_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    take = requests.Connection._take

    def note(self: Any, request: Any, data: bytes) -> None:
        sizes.append(len(data))
        take(self, request, data)

    monkeypatch.setattr(requests.Connection, "_take", note)
    data = b'{"content": "%b"}' % (b"a" * 3000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
    async with serving_script() as (url, _):
        answer = await answer_to(
            url, CHUNKED[:-2] + b"Connection: close\r\n\r\n" + chunks + b"0\r\n\r\n"
        )
    assert answer.partition(b"\r\n\r\n")[2].count(b"97") == 3000
    assert sum(sizes) == len(data)
    assert len(sizes) < len(data) / 50


@pytest.mark.parametrize("behind", [b"\r\n", HEALTH, b"no HTTP\r\n\r\n"])
@pytest.mark.parametrize(
    "last",
    [
        post("/tokenize", b'{"content": "a"}', "Connection: close"),
        post("/tokenize", b'{"content": "a"}').replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEALTH.replace(b"GET", b"OPTIONS")[:-2] + b"Content-Length: 1\r\n\r\na",
    ],
)
async def test_bytes_after_the_last_request_do_not_end_its_answer(
    last: bytes, behind: bytes
) -> None:
    async with unharmed() as (url, _):
        answer = await answer_to(url, last + behind)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.system
async def test_mutated_requests() -> None:
    async with unharmed() as (url, _):
        statuses = await send_all_mutated(url, range(300))
    assert 400 in statuses
    assert not [status for status in statuses if status >= 500 and status != 501]


@pytest.mark.system
async def test_the_head_and_the_end_of_a_stream_are_written_with_the_part_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bytes] = []
    send_now = TCPConnection._send_now

    def noted(connection: TCPConnection, data: bytes) -> bytes:
        written.append(data)
        return send_now(connection, data)

    monkeypatch.setattr(TCPConnection, "_send_now", noted)
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 3}
    async with serving_script() as (url, _), httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert written[0].startswith(b"HTTP/1.1 200 ") and b'"role":"assistant"' in written[0]
    assert written[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
