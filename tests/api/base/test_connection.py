"""Connections: they close when they should, and who goes away ends the work."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from typing import Any
from unittest.mock import Mock

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.clients import client_of
from tests.support.http_server import connected, post, serving_script, slots_in_use
from tests.support.scripts import endless
from tests.support.waiting import patiently, until
from trioserve.api.base.reply import KeepAlive
from trioserve.api.edge.connection import Body, Request, Sender
from trioserve.api.service import Service
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.errors import BodyTimeoutError
from trioserve.testing import ScriptedBackend, scripted


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "go", **fields}).encode()


async def until_in_use(service: Service, n: int) -> None:
    """Wait until `n` slots are in use."""

    async def reached() -> bool:
        return await slots_in_use(service) == n

    await until(reached)


async def read_all(stream: trio.SocketStream) -> bytes:
    with patiently():
        return b"".join([part async for part in stream])


async def until_broken(stream: trio.SocketStream) -> None:
    """Send until the other side has closed a connection. Reads nothing."""
    with patiently():
        try:
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.01)
        except trio.BrokenResourceError:
            pass


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("path", "streaming"), [("/completion", True), ("/v1/completions", False)])
async def test_a_client_that_goes_away_frees_its_slot(path: str, streaming: bool) -> None:
    async with serving_script(endless()) as (url, service):
        with capture_logs() as logs:
            async with connected(url) as stream:
                await stream.send_all(post(path, body(stream=streaming)))
                await until_in_use(service, 1)
            await until_in_use(service, 0)
            await until(lambda: any(line["event"] == "request" for line in logs))
        (line,) = (line for line in logs if line["event"] == "request")
        assert (line["status"], line["cancelled"]) == (200 if streaming else 499, "disconnect")


async def test_a_client_that_goes_away_while_queued_is_forgotten() -> None:
    async with serving_script(endless()) as (url, service):  # two slots

        async def until_waiting(n: int) -> None:
            with patiently():
                while len((await service.server.status()).waiting) != n:
                    await trio.sleep(0.005)

        async with connected(url) as one, connected(url) as two:
            await one.send_all(post("/completion", body()))
            await two.send_all(post("/completion", body()))
            async with connected(url) as three:
                await three.send_all(post("/completion", body()))
                await until_waiting(1)
            await until_waiting(0)
            assert await slots_in_use(service) == 2


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async with serving_script(max_body_size=1000) as (url, _), connected(url) as stream:
        head = post("/completion", b"", "Content-Length: 100000000").replace(
            b"Content-Length: 0\r\n", b""
        )
        await stream.send_all(head)
        answer = b""
        with patiently():
            while b"1000 bytes" not in answer:
                answer += await stream.receive_some()
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close\r\n" in answer  # or a next request could come in between


async def test_a_connection_is_kept_where_all_was_read() -> None:
    async with client_of() as client:
        for content in (b"{}", b"", b"{"):
            assert "connection" not in (await client.post("/tokenize", content=content)).headers
        assert "connection" not in (await client.get("/missing")).headers


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_client_that_sends_too_much_still_reads_why(chunked: bool) -> None:
    large = b'{"prompt": "' + b"x" * 20_000_000 + b'"}'

    async def parts() -> Any:
        yield large

    content = parts() if chunked else large
    async with client_of(max_body_size=100_000) as client:
        answer = await client.post("/completion", content=content)
        assert answer.status_code == 413
        assert "100000 bytes" in answer.json()["error"]["message"]
        # The server still answers.
        assert (await client.get("/health")).status_code == 200


@pytest.mark.system
@pytest.mark.parametrize("unread_tokens", [16, 2**20])  # the mailbox shows it, or the socket
async def test_a_client_that_stops_reading_is_cut_off(unread_tokens: int) -> None:
    def quick(backend: ScriptedBackend) -> None:
        time.sleep(0)

    backend = endless(quick)
    limits: dict[str, Any] = {"unread_tokens": unread_tokens, "stall_timeout": 0.2}
    async with serving_script(backend, **limits) as (url, service):
        with capture_logs() as logs:
            async with connected(url) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await stream.send_all(post("/completion", body(stream=True)))
                await until(lambda: any(line["event"] == "request" for line in logs))
                await until_in_use(service, 0)
                # The server has closed its side, though nothing was read.
                await until_broken(stream)
        ends = [line for line in logs if line["event"] == "request"]
        assert [line["cancelled"] for line in ends] == ["stalled_reader"]


@pytest.mark.system
async def test_a_client_that_leaves_a_finished_response_unread_is_cut_off() -> None:
    text = "x" * 20_000_000
    async with serving_script(stall_timeout=0.1) as (url, _), connected(url) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with capture_logs() as logs:
            content = {"messages": [{"role": "user", "content": text}]}
            await stream.send_all(post("/apply-template", json.dumps(content).encode()))
            await until(lambda: any(line["event"] == "client stopped reading" for line in logs))
            await until_broken(stream)


@pytest.mark.system
async def test_nothing_is_left_open_after_many_requests() -> None:
    async with serving_script(endless()) as (url, service):

        async def one(kind: int) -> None:
            async with connected(url) as stream:
                if kind == 0:
                    await stream.send_all(post("/tokenize", b"{}", "Connection: close"))
                    await read_all(stream)
                elif kind == 1:
                    await stream.send_all(post("/tokenize", b"{}"))
                    await stream.receive_some()
                elif kind == 2:  # leaves in the middle of a stream
                    await stream.send_all(post("/completion", body(stream=True)))
                    await stream.receive_some()
                elif kind == 3:  # leaves before the answer
                    await stream.send_all(post("/completion", body()))
                elif kind == 4:  # leaves in the middle of its request
                    await stream.send_all(post("/completion", b"{}")[:-2])
                else:
                    await stream.send_all(post("/completion", b"nojson", "Connection: close"))
                    await read_all(stream)

        await one(0)
        before = open_descriptors()
        for _ in range(4):
            async with trio.open_nursery() as nursery:
                for i in range(50):
                    nursery.start_soon(one, i % 6)
        await until(lambda: open_descriptors() <= before)
        await until_in_use(service, 0)


async def test_a_disconnect_in_the_last_message_cancels_nothing() -> None:
    messages: list[Any] = [{"type": "http.request", "body": b"{}", "more_body": False}]
    is_last, is_sent = trio.Event(), trio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await is_last.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            is_last.set()  # Hypercorn reports a disconnect, and then ends the response
            await wait_all_tasks_blocked()
            is_sent.set()

    app = create_app(Config(), load=scripted(ScriptedBackend()))
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/tokenize",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"2")],
    }
    async with trio.open_nursery() as nursery:
        app.nursery = nursery
        await nursery.start(app.extensions["trioserve"].run)
        await app(scope, receive, send)  # type: ignore[arg-type]
        assert is_sent.is_set()
        await app.extensions["trioserve"].stop()


async def test_a_pause_of_the_server_costs_an_upload_one_second(
    mock_clock: MockClock,
) -> None:
    bodies: list[bytes] = []

    async def read(arriving: Body) -> None:
        request = Mock(body=arriving, overload=None)
        bodies.append(await Request.receive_whole(request, None, patience=3))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, arriving := Body(None, None))
        for _ in range(2):
            await wait_all_tasks_blocked()
            mock_clock.jump(3600)
        arriving.append(b"{}")
        arriving.set_complete()
    assert bodies == [b"{}"]
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, Body(None, None))
            for _ in range(3):
                await wait_all_tasks_blocked()
                mock_clock.jump(3600)
    assert caught.group_contains(BodyTimeoutError)


async def test_beats_fill_the_silence_and_stop_at_the_end(autojump_clock: MockClock) -> None:
    sent: list[tuple[float, bytes]] = []

    async def send(message: Any) -> None:
        sent.append((trio.current_time(), message["body"]))
        await trio.sleep(1)

    async def beat() -> bytes:
        return b"beat"

    sender = Sender(send)
    async with trio.open_nursery() as nursery:
        await sender({"body": b"start"})
        nursery.start_soon(sender.beside, trio.sleep_forever)
        sender.keep_alive(KeepAlive(10, beat))
        await trio.sleep(24)
        await sender({"body": b"a"})
        await trio.sleep(9.5)  # it is 35.5, and a beat began at 35
        await sender({"body": b"b"})
        await sender.close({"body": b"end"})
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert sent == [
        (0, b"start"),
        (10, b"beat"),
        (20, b"beat"),
        (25, b"a"),
        (35, b"beat"),
        (36, b"b"),
        (37, b"end"),
    ]


async def test_a_beat_is_not_sent_when_something_else_was(autojump_clock: MockClock) -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])
        await trio.sleep(30 if message["body"] == b"long" else 0)

    async def slow_beat() -> bytes:
        await trio.sleep(5)
        return b"beat"

    sender = Sender(send)
    async with trio.open_nursery() as nursery:
        await sender({"body": b"start"})
        nursery.start_soon(sender.beside, trio.sleep_forever)
        sender.keep_alive(KeepAlive(10, slow_beat))
        await trio.sleep(12)
        await sender({"body": b"a"})  # a beat was being made
        await trio.sleep(9)
        await sender({"body": b"long"})  # longer than the interval: the beat waits for its end
        await trio.sleep(16)
        nursery.cancel_scope.cancel()
    assert sent == [b"start", b"a", b"long", b"beat"]
