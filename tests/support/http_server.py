"""Serves an app on a real socket within a test."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import hypercorn
import hypercorn.trio
import trio

from tests.support.described import watch
from tests.support.model_processes import InName
from tests.support.waiting import patiently
from trioserve.api.service import Service
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.testing import ScriptedBackend, scripted


def hypercorn_config() -> hypercorn.Config:
    """No access log, a short farewell, and patience with a machine that stands still."""
    config = hypercorn.Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.graceful_timeout = 0.5
    config.keep_alive_timeout = 600
    return config


@asynccontextmanager
async def serving(app: Callable[..., Any], bind: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve an app; gives its base URL. The model may still be loading.

    What it answers must be as ``/openapi.json`` says.
    """
    problems = watch(app)
    stop, config = trio.Event(), hypercorn_config()
    config.bind = [bind]
    async with trio.open_nursery() as nursery:
        binds = await nursery.start(
            partial(hypercorn.trio.serve, app, config, shutdown_trigger=stop.wait)
        )
        yield str(binds[0])
        stop.set()
    assert not problems, problems[0]


@asynccontextmanager
async def serving_script(
    backend: ScriptedBackend | None = None, **config: object
) -> AsyncIterator[tuple[str, Service]]:
    """Serve a scripted backend with this configuration; gives the base URL and the service."""
    config.setdefault("stream_interval_ms", 0)
    app = create_app(Config(**config), load=scripted(backend or ScriptedBackend()))
    service = app.extensions["trioserve"]
    async with serving(app) as url:
        await service.wait_loaded()
        yield url, service


async def slots_in_use(service: Service | InName) -> int:
    """The number of slots with a task."""
    status = await service.server.status()
    return sum(slot.task_id is not None for slot in status.slots)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[trio.SocketStream]:
    """Open a raw connection to a server."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        yield stream


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Write a request by hand."""
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


@asynccontextmanager
async def chunks_of(
    url: str, request: bytes, content_type: str = "text/event-stream"
) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Send a request written by hand; gives a function that waits for the next chunk."""
    unread = b""

    async def until(mark: bytes) -> bytes:
        nonlocal unread
        while mark not in unread:
            data = await stream.receive_some()
            assert data, unread
            unread += data
        found, _, unread = unread.partition(mark)
        return found

    async def next_chunk() -> str:
        nonlocal unread
        with patiently():
            size = int(await until(b"\r\n"), 16)
            while len(unread) < size + 2:
                unread += await stream.receive_some()
            chunk, unread = unread[:size], unread[size + 2 :]
        return chunk.decode()

    async with connected(url) as stream:
        await stream.send_all(request)
        head = (await until(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        assert f"content-type: {content_type}".encode() in head
        yield next_chunk


async def read_response(stream: trio.SocketStream) -> httpx.Response:
    """Read a response by hand."""
    data = b""
    with patiently():
        async for part in stream:
            data += part
            head, _, body = data.partition(b"\r\n\r\n")
            if body.endswith(b"}}"):
                return httpx.Response(int(head.split()[1]), content=body)
    raise AssertionError(data)


@asynccontextmanager
async def serving_at(
    path: Path, backend: ScriptedBackend | None = None, **config: object
) -> AsyncIterator[Service]:
    """Serve a scripted backend on a Unix socket."""
    config.setdefault("stream_interval_ms", 0)
    app = create_app(Config(**config), load=scripted(backend or ScriptedBackend()))
    service = app.extensions["trioserve"]
    async with serving(app, f"unix:{path}"):
        await service.wait_loaded()
        yield service
