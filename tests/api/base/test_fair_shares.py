"""Over HTTP, one key does not lock out another: see `FairLimiter` for how places are shared."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.clients import TIMEOUT, client_of
from tests.support.http_server import serving
from tests.support.scripts import answering
from tests.support.waiting import patiently, until
from trioserve.api.base.body import LongReader
from trioserve.api.tools.calls import ClientToolCalls
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.errors import QueueFullError
from trioserve.fair_limiter import Workers, current_client, text_threads, tool_calls, working_for
from trioserve.server.context import ANYONE
from trioserve.server.observers.observer import ToolRecord
from trioserve.testing import scripted
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult
from trioserve.types import Grammar

KEYS = ("first", "second")

TINY = {"type": "object", "properties": {"a": {"type": "integer"}}}


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_schemas_of_one_key_do_not_hold_up_those_of_another() -> None:
    backend, end = answering('{"a": 1}'), threading.Event()
    seen: list[str] = []

    def compile(grammar: Grammar) -> None:
        seen.append(current_client())
        if "costly" in grammar.source:
            assert end.wait(60)

    backend.on_compile = compile
    async with client_of(backend, api_keys=KEYS) as client, trio.open_nursery() as nursery:

        async def ask(key: str, name: str) -> httpx.Response:
            schema = {"type": "object", "properties": {name: {"type": "integer"}}}
            body = {"prompt": "x", "n_predict": 4, "json_schema": schema}
            return await client.post("/completion", json=body, headers=of(key))

        for n in range(20):
            nursery.start_soon(ask, "first", f"costly{n}")
        with patiently():
            await until(lambda: len(seen) == 2)  # as many as one key may have
            assert (await ask("second", "a")).status_code == 200
        assert seen == ["first", "first", "second"]
        end.set()
        nursery.cancel_scope.cancel()


async def test_a_client_without_a_key_is_known_by_its_address() -> None:
    backend = answering("1")
    seen: list[str] = []
    backend.on_compile = lambda _: seen.append(current_client())
    body = {"prompt": "x", "n_predict": 4, "json_schema": TINY}
    app = create_app(Config(stream_interval_ms=0), load=scripted(backend))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        await app.extensions["trioserve"].wait_loaded()
        await client.post("/completion", json=body)
        assert seen == ["127.0.0.1"]


class EndlessTool(Tool):
    """A tool that runs until it is cancelled, unless it has an argument."""

    def __init__(self) -> None:
        self.running: list[str] = []

    @property
    def info(self) -> ToolInfo:
        return ToolInfo(name="endless")

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        self.running.append(current_client())
        if not arguments:
            await trio.sleep_forever()
        return ToolResult.of_text("done")


async def test_calls_of_one_client_leave_places_to_another() -> None:
    calls, tool = ClientToolCalls(), EndlessTool()
    places = tool_calls()
    places._max_waiting = 10
    record = ToolRecord("endless", "server", context=ANYONE)
    run = partial(calls.run, tool, context=ToolCallContext(), record=record)
    async with trio.open_nursery() as nursery:
        with working_for("first"):
            for _ in range(places.n_each + 10):
                nursery.start_soon(run, {})
            await wait_all_tasks_blocked()
            with pytest.raises(QueueFullError, match="32 running and 10 waiting") as caught:
                await run({})
            assert caught.value.status == 429
            assert caught.value.retry_after >= 1
        with working_for("second"):
            assert (await run({"ends": True})).text == "done"
        nursery.cancel_scope.cancel()
    assert tool.running == ["first"] * places.n_each + ["second"]


@pytest.mark.parametrize("aside", [False, True])
async def test_long_texts_of_one_client_do_not_hold_up_those_of_another(aside: bool) -> None:
    workers, end = Workers(), threading.Event()
    limiter = workers._aside if aside else text_threads()
    try:
        async with trio.open_nursery() as nursery:
            with working_for("first"):
                for _ in range(50):
                    nursery.start_soon(partial(workers.offload, end.wait, aside=aside))
            await wait_all_tasks_blocked()
            assert limiter.n_held == limiter.n_each
            with working_for("second"):
                assert await workers.offload(lambda: "done", aside=aside) == "done"
            end.set()
    finally:
        end.set()
    await workers.aclose()


async def test_bodies_of_one_key_do_not_hold_up_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long bodies are parsed in threads, which are shared too."""
    end = threading.Event()
    n_blocked = 0

    def read(reader: LongReader) -> Any:
        nonlocal n_blocked
        if "block" in reader._text:
            n_blocked += 1
            assert end.wait(60)
        return read_really(reader)

    read_really = LongReader.read
    monkeypatch.setattr(LongReader, "read", read)
    async with client_of(answering("x"), api_keys=KEYS) as client, trio.open_nursery() as nursery:

        async def ask(key: str, word: str) -> httpx.Response:
            body = {"content": word * 10_000}
            return await client.post("/tokenize", json=body, headers=of(key))

        for _ in range(12):
            nursery.start_soon(ask, "first", "block ")
        with patiently():
            await until(lambda: n_blocked == 3)
            assert (await ask("second", "word ")).status_code == 200
        end.set()
