"""Responses in the background: what is stored of them while they run, and how their ends are."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.support.clients import TIMEOUT, client_and_service, client_of
from tests.support.event_source import gated
from tests.support.scripts import answering
from tests.support.stored import RESPONSES, stored
from tests.support.waiting import until
from trioserve.api import streams
from trioserve.api.sessions import StreamSession
from trioserve.errors import StoreError
from trioserve.store import Records, Store

TEXT = "0123456789" * 5


async def begun(client: httpx.AsyncClient) -> str:
    return str((await stored(client, background=True))["id"])


async def status_of(client: httpx.AsyncClient, id_: str) -> str:
    answer = await client.get(f"{RESPONSES}/{id_}")
    return str(answer.json()["status"]) if answer.status_code == 200 else answer.text


@asynccontextmanager
async def held(store: Store) -> AsyncIterator[Callable[[], None]]:
    """Hold up the thread of a store during a block, or until a function is called."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hold(_records: Records) -> None:
        has_begun.set()
        assert may_go_on.wait(TIMEOUT)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.do, hold)
        await until(has_begun.is_set)
        try:
            yield may_go_on.set
        finally:
            may_go_on.set()


class Spy:
    """Calls `Store.do`, with something else in the place of the call after `after` more calls."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._do = store.do
        self.n_calls = 0
        self.errors: list[Exception] = []
        self.instead: dict[int, Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]] = {}
        monkeypatch.setattr(store, "do", self)

    async def __call__(self, *args: Any) -> Any:
        self.n_calls += 1
        instead = self.instead.pop(self.n_calls, None)
        do = partial(self._do, *args)
        try:
            return await (do() if instead is None else instead(do))
        except Exception as error:
            self.errors.append(error)
            raise


async def test_a_response_that_runs_is_not_evicted() -> None:
    backend, gate = gated(TEXT)
    async with client_of(backend, store_size=3 * 2**20) as client:
        id_ = await begun(client)
        for n in range(5):
            file = {"file": (f"{n}.jsonl", b"x" * 900_000)}
            made = await client.post("/v1/files", data={"purpose": "batch"}, files=file)
            assert made.status_code == 200
        assert await status_of(client, id_) in ("queued", "in_progress")
        gate.open()
        await until(lambda: ends_as(client, id_, "completed"))


async def ends_as(client: httpx.AsyncClient, id_: str, status: str) -> bool:
    now = await status_of(client, id_)
    assert now in ("queued", "in_progress", status)
    return now == status


async def test_a_response_without_a_place_in_the_queue_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "WAIT", 0)  # it is answered before that is known
    backend, gate = gated(TEXT, n_slots=1)
    async with client_of(backend, max_queue=1) as client:
        ids = [await begun(client) for _ in range(3)]
        await until(lambda: ends_as(client, ids[-1], "failed"))
        error = (await client.get(f"{RESPONSES}/{ids[-1]}")).json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        gate.open()


async def test_a_background_request_counts_as_memory_while_it_runs() -> None:
    n_bytes = 2**16
    async with client_and_service(answering("Hello")) as (client, service):
        body = {"input": "Hi", "background": True, "instructions": "x" * n_bytes}
        answer = []

        async def post() -> None:
            answer.append(await client.post(RESPONSES, json=body))

        async with trio.open_nursery() as nursery, held(service.store):
            nursery.start_soon(post)
            await until(lambda: service.stored_runs)
            assert service.memory.n_held >= 2 * n_bytes  # of the run, and of the request
        await until(lambda: not service.stored_runs and not service.memory.n_held)


async def test_the_next_start_settles_responses_that_ran(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with client_and_service(answering("Hello"), store=path) as (client, service):
        answer = await client.post(RESPONSES, json={"input": "Hi"})
        body = {**answer.json(), "status": "queued", "background": True}
        own, id_ = service.store.owner_of(""), "resp_" + "0" * 32
        body = {**body, "id": id_}
        body.pop("output")
        await service.store.do(
            lambda records: records.add(id_, "response", own, body, is_open=True)
        )
    async with client_and_service(store=path) as (client, service):
        left = await service.store.do(lambda records: records.open_ones("response"))
        assert left == []  # so it can be evicted, and expires
        found = (await client.get(f"{RESPONSES}/{id_}")).json()
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "server_restarted"}


async def test_a_poll_tells_the_truth_while_the_end_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, gate = gated(TEXT)
    async with client_and_service(backend) as (client, service):
        id_ = await begun(client)
        gate.allow(3)
        found = []

        async def poll() -> None:
            found.append(await status_of(client, id_))

        async with trio.open_nursery() as nursery, held(service.store) as go_on:
            spy = Spy(service.store, monkeypatch)
            nursery.start_soon(poll)
            await until(lambda: spy.n_calls == 1)
            await client.delete("/v1/stream", params={"conv_id": id_})
            await until(lambda: spy.n_calls == 2)
            go_on()
        gate.open()
        assert found[0] in ("queued", "in_progress", "cancelled")
        assert await status_of(client, id_) == "cancelled"


async def test_a_cancel_returns_if_the_store_fails_and_a_later_read_stores_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(_do: object) -> None:
        raise ZeroDivisionError

    backend, gate = gated(TEXT)
    async with client_and_service(backend) as (client, service):
        id_ = await begun(client)
        gate.allow(3)
        spy = Spy(service.store, monkeypatch)
        spy.instead[2] = fail
        with trio.fail_after(TIMEOUT / 4):
            answer = await client.post(f"{RESPONSES}/{id_}/cancel")
        gate.open()
        assert answer.json()["status"] == "cancelled"
        assert await status_of(client, id_) == "cancelled"
        assert not service.stored_runs
        assert not await service.store.do(lambda records: records.open_ones("response"))
        assert (await client.delete(f"{RESPONSES}/{id_}")).status_code == 200


async def test_an_end_waits_for_a_store_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    n_failed = 0

    async def fail(_do: object) -> None:
        nonlocal n_failed
        n_failed += 1
        raise StoreError("The disk is full.")

    monkeypatch.setattr("trioserve.api.stored.runs._PAUSE", 0.001)
    backend, gate = gated(TEXT)
    async with client_and_service(backend) as (client, service):
        id_ = await begun(client)
        Spy(service.store, monkeypatch).instead |= {1: fail, 2: fail}
        gate.open()
        await until(lambda: not service.stored_runs)
        found = (await client.get(f"{RESPONSES}/{id_}")).json()
        assert (found["status"], n_failed) == ("completed", 2)
        assert found["output"][0]["content"][0]["text"] == TEXT


async def test_a_response_runs_until_its_end_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, may_store = trio.Event(), trio.Event()

    async def store_later(do: Callable[[], Awaitable[Any]]) -> None:
        ends.set()
        await may_store.wait()
        await do()

    backend, gate = gated("Hello")
    async with client_and_service(backend) as (client, service):
        id_ = await begun(client)
        Spy(service.store, monkeypatch).instead[1] = store_later
        gate.open()
        await ends.wait()
        found = (await client.get(f"{RESPONSES}/{id_}")).json()
        assert (found["status"], found["output"]) == ("in_progress", [])
        assert found["completed_at"] is None and found["usage"] is None
        may_store.set()
        await until(lambda: ends_as(client, id_, "completed"))
        assert (await client.get(f"{RESPONSES}/{id_}")).json()["output"]


async def test_an_end_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_stored = trio.Event()

    async def store_and_wait(do: Callable[[], Awaitable[Any]]) -> None:
        await do()
        is_stored.set()
        await trio.sleep_forever()

    backend, gate = gated("Hello")
    async with client_and_service(backend) as (client, service):
        id_ = await begun(client)
        spy = Spy(service.store, monkeypatch)
        spy.instead[1] = store_and_wait
        gate.open()
        await is_stored.wait()
        await client.delete("/v1/stream", params={"conv_id": id_})
        await until(lambda: spy.n_calls == 2 and not service.stored_runs)
        assert await status_of(client, id_) == "completed"
        assert spy.errors == []


async def test_an_error_of_a_response_is_not_its_own_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_and_service(answering("Hello")) as (client, service):
        failures = []
        forget = service.streams.forget

        def look(session: StreamSession) -> None:
            failures.append(session.failure)
            forget(session)

        monkeypatch.setattr(service.streams, "forget", look)
        body = {"input": "Hi", "background": True, "temperature": "hot"}
        assert (await client.post(RESPONSES, json=body)).status_code == 400
        (failure,) = failures
        assert failure is not None and failure.__cause__ is not failure
