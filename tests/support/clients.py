"""Clients of a server within a test: httpx, OpenAI's SDK and Anthropic's."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import attrs
import httpx
import openai
import trio

from tests.support.http_server import serving, serving_script
from tests.support.scripts import ENDLESS
from trioserve.api import App
from trioserve.api.service import Service
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.server import Server
from trioserve.testing import ScriptedBackend

#: Longer than any answer takes, in seconds.
TIMEOUT = 60


@asynccontextmanager
async def client_and_service(
    backend: ScriptedBackend | None = None, **config: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """Serve a scripted backend; gives a client and the service."""
    async with (
        serving_script(backend, **config) as (url, service),
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client,
    ):
        yield client, service


@asynccontextmanager
async def client_of(
    backend: ScriptedBackend | None = None, **config: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a scripted backend; gives a client."""
    async with client_and_service(backend, **config) as (client, _):
        yield client


@asynccontextmanager
async def client_of_app(app: App) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an app and wait until its model is loaded; gives a client."""
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client,
    ):
        await app.extensions["trioserve"].wait_loaded()
        yield client


@asynccontextmanager
async def sleeper(
    load: Callable[..., Any], **config: object
) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    """A client of a server that is asleep, and that server."""
    app = create_app(Config(stream_interval_ms=0, **config), load=load)
    service = app.extensions["trioserve"]
    async with serving(app) as url:
        await service.wait_loaded()
        await service.server.sleep()
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield client, service.server


async def use_openai(
    backend: ScriptedBackend, use: Callable[[openai.OpenAI], None], **config: Any
) -> None:
    """Let OpenAI's SDK use a server, in a thread."""

    def run(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            use(client)

    async with serving_script(backend, **config) as (url, _):
        await trio.to_thread.run_sync(run, url)


async def use_anthropic(
    backend: ScriptedBackend, use: Callable[[anthropic.Anthropic], None], **config: Any
) -> None:
    """Let Anthropic's SDK use a server, in a thread."""

    def run(url: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
            use(client)

    async with serving_script(backend, **config) as (url, _):
        await trio.to_thread.run_sync(run, url)


def events_in(text: str, *, done: bool = True) -> list[Any]:
    """The data of a body of events without names; with `done`, the last one is the word DONE."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    if done:
        assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def named_events_in(text: str) -> list[dict[str, Any]]:
    """The data of a body of events, whose names must be the types in their data."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_body(
    message: str, param: str | None, *, status: int = 400, **rest: Any
) -> dict[str, Any]:
    """The body of an error, in OpenAI's form."""
    kind = "not_supported_error" if status == 501 else "invalid_request_error"
    fields = {"code": status, "message": message, "type": kind, "param": param}
    return {"error": {**fields, **rest}}


@attrs.frozen
class Busy:
    """A server whose one slot is taken until `free` is called."""

    client: httpx.AsyncClient
    service: Service
    free: Callable[[], Awaitable[None]]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.client, self.service))


@asynccontextmanager
async def busy(**config: Any) -> AsyncIterator[Busy]:
    """Serve with one slot, which is taken by a stream that is read."""

    def script(prompt: str) -> str:
        return "x" * ENDLESS if "endless" in prompt else "Hello"

    backend = ScriptedBackend(script, n_slots=1, n_ctx=2 * ENDLESS)
    backend.on_decode = lambda backend: time.sleep(0.001)
    has_left = trio.Event()

    async def take_slot(server: Server, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with server.stream_complete("endless") as stream:
                await anext(stream)
                task_status.started(scope)
                async for _ in stream:  # an unread stream loses its slot when its mailbox is full
                    pass
        has_left.set()

    async with (
        client_and_service(backend, **config) as (client, service),
        trio.open_nursery() as nursery,
    ):
        taken = await nursery.start(take_slot, service.server)

        async def free() -> None:
            taken.cancel()
            await has_left.wait()

        yield Busy(client, service, free)
        await free()
