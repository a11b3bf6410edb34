"""Batches when something fails: each ends alone, or waits, and none ends the server."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.server.test_keys import replace, table
from tests.support.clients import client_and_service, client_of
from tests.support.http_server import serving
from tests.support.scripts import CHAT, answering, endless
from tests.support.stored import (
    CHATS,
    Asked,
    begin,
    expire,
    file_of,
    line,
    lines_of,
    never,
    shown,
    until_over,
    upload,
)
from tests.support.waiting import until
from trioserve.api import batches as batches_module
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Reply
from trioserve.api.batches import KIND, PENDING
from trioserve.api.service import AppState, Service
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.errors import StoreError
from trioserve.store import Part, Record, Records, open_store
from trioserve.testing import ScriptedBackend


class Gated:
    """Plays the app to the batches of a service: it answers a number of lines, and then waits."""

    def __init__(self, service: AppState, n_free: int) -> None:
        self.n_asked, self._n_free, self._reply_to = 0, n_free, service.reply_to
        self.opened = trio.Event()
        service.reply_to = self._reply_later

    async def _reply_later(self, *request: Any) -> Reply:
        self.n_asked += 1
        if self.n_asked > self._n_free:
            await self.opened.wait()
        return await self._reply_to(*request)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try what has failed again at once."""
    monkeypatch.setattr(batches_module, "_PAUSE", 0.001)


async def test_open_batches_of_one_key_need_no_place_in_a_queue() -> None:
    async with client_and_service(parallel=32) as (client, service):
        service.reply_to = never
        file = await upload(client, file_of([line(n) for n in range(128)]))
        wanted = {"input_file_id": file, "endpoint": CHATS}
        ids = [(await client.post("/v1/batches", json=wanted)).json()["id"] for _ in range(18)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        for id_ in ids:
            assert (await client.post(f"/v1/batches/{id_}/cancel")).status_code == 200
        for id_ in ids:
            assert (await until_over(client, id_))["status"] == "cancelled"


async def test_a_batch_that_fails_fails_alone() -> None:
    async with client_and_service(answering("Hello")) as (client, service):
        reply_to = service.reply_to

        async def fail(incoming: Incoming, caller: Caller) -> Reply:
            if "fail" in str(await incoming.fields()):
                raise MemoryError("no more")
            return await reply_to(incoming, caller)

        service.reply_to = fail
        with capture_logs() as logged:
            wrong = await begin(client, [line(0, "Hi"), line(1, "fail"), line(2, "Hi")])
            right = await begin(client, [line(n) for n in range(8)])
            assert (await until_over(client, right["id"]))["status"] == "completed"
            over = await until_over(client, wrong["id"])
        assert over["status"] == "failed" and over["failed_at"] and over["errors"]["data"]
        assert {str(each["exc_info"]) for each in logged if "exc_info" in each} == {"no more"}
        assert (await client.post(CHATS, json=CHAT)).status_code == 200


@asynccontextmanager
async def loading(**config: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Callable[[], None]]]:
    """Serve an app whose model loads until a function is called."""
    may_load = threading.Event()

    def load(*_args: object, **_options: object) -> ScriptedBackend:
        assert may_load.wait(60)
        return answering("Hello")

    app = create_app(Config(stream_interval_ms=0, **config), load=load)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        service: Service = app.extensions["trioserve"]
        await until(lambda: service._store is not None)
        try:
            yield client, may_load.set
        finally:
            may_load.set()


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_a_batch_that_is_created_while_the_model_loads_waits(
    tmp_path: Path, is_on_disk: bool
) -> None:
    store = str(tmp_path / "a.db") if is_on_disk else None
    async with loading(store=store) as (client, load):
        made = await begin(client, [line(0), line(1)])
        cancelled = await begin(client, [line(0)])
        assert (await client.post(f"/v1/batches/{cancelled['id']}/cancel")).status_code == 200
        assert (await shown(client, made["id"]))["status"] == "in_progress"
        load()
        over = await until_over(client, made["id"])
        assert over["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert (await until_over(client, cancelled["id"]))["status"] == "cancelled"


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHATS, {**CHAT, "stream": True}, {"X-Conversation-Id": "a"}),
        ("/v1/responses", {"input": "Hi", "background": True}, {}),
    ],
)
async def test_no_session_begins_while_the_model_loads(
    path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with loading() as (client, _):
        answer = await client.post(path, json=body, headers=headers)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "Loading model"


async def test_a_batch_is_started_once_if_the_store_is_read_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    may_read, was_read = threading.Event(), threading.Event()
    read = Records.open_ones

    def read_late(records: Records, kind: str) -> Any:
        if not may_read.is_set():
            raise StoreError("another program has locked it")
        was_read.set()
        return read(records, kind)

    monkeypatch.setattr(Records, "open_ones", read_late)
    async with client_and_service(store=str(tmp_path / "a.db")) as (client, service):
        asked = Gated(service, 2)
        made = await begin(client, [line(n) for n in range(6)])
        may_read.set()
        await until(was_read.is_set)
        await trio.testing.wait_all_tasks_blocked(0.01)
        asked.opened.set()
        over = await until_over(client, made["id"])
        assert over["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert asked.n_asked == 6


async def test_a_batch_that_is_stored_is_started_even_if_the_store_fails_then(
    monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    find, n_left = Records.find, 1

    def fail_once(records: Records, id: str, kind: str, owner: bytes) -> Record | None:
        nonlocal n_left
        if kind == KIND and n_left:
            n_left -= 1
            raise StoreError("The store x cannot be used: another program has locked it.")
        return find(records, id, kind, owner)

    monkeypatch.setattr(Records, "find", fail_once)
    async with client_of(answering("Hello")) as client:
        made = await begin(client, [line(0)])
        assert (await until_over(client, made["id"]))["status"] == "completed"


async def test_a_damaged_record_of_one_batch_is_one_batch_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with client_and_service(store=str(path)) as (client, service):
        service.reply_to = never
        damaged = (await begin(client, [line(0)], metadata={"a": "mark this"}))["id"]
        left = (await begin(client, [line(0), line(1)]))["id"]
    data = path.read_bytes()
    assert b"mark this" in data
    path.write_bytes(data.replace(b"mark this", b"\xff" * 9))
    async with client_of(answering("Hello"), store=str(path)) as client:
        assert (await until_over(client, left))["request_counts"]["completed"] == 2
        over = await until_over(client, damaged)
        assert over["status"] == "failed"
        assert "damaged" in over["errors"]["data"][0]["message"]
        listed = (await client.get("/v1/batches")).json()["data"]
        assert {each["id"]: each["status"] for each in listed} == {
            damaged: "failed",
            left: "completed",
        }


async def test_damaged_records_do_not_hide_the_rest_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with client_of(answering("Hello"), store=str(path)) as client:
        marks = [{"a": "mark this"}, {"a": "not that"}]
        batches = [(await begin(client, [line(0)], metadata=each))["id"] for each in marks]
        ends = [(await until_over(client, batch))["output_file_id"] for batch in batches]
    data = path.read_bytes()
    for mark in (b"mark this", f'"filename":"{batches[0]}'.encode()):
        assert mark in data
        data = data.replace(mark, b"\xff" * len(mark))
    path.write_bytes(data)
    async with client_of(store=str(path)) as client:
        listed = (await client.get("/v1/batches")).json()["data"]
        assert [each["status"] for each in listed] == ["completed", "failed"]
        assert {each["id"] for each in listed} == {*batches}
        for query in ("", "?purpose=batch_output"):
            files = (await client.get(f"/v1/files{query}")).json()["data"]
            assert ends[1] in (ids := [each["id"] for each in files]) and ends[0] not in ids


# -- which answers are final


@pytest.mark.parametrize(
    ("status", "is_final"),
    [
        *((status, True) for status in (400, 404, 413, 422, 501)),
        *((status, False) for status in (401, 403, 408, 409, 429, 500, 502, 503, 504)),
    ],
)
async def test_a_line_is_tried_again_unless_the_request_itself_is_wrong(
    soon: None, status: int, is_final: bool
) -> None:
    async with client_and_service() as (client, service):
        asked = Asked(service, lambda n: status if n <= 2 else 200)
        over = await until_over(client, (await begin(client, [line(0)]))["id"])
        counts = over["request_counts"]
        assert (counts["completed"], counts["failed"]) == ((0, 1) if is_final else (1, 0))
        assert asked.n_asked == (1 if is_final else 3)


async def test_a_failed_engine_that_stays_burns_no_lines(soon: None) -> None:
    backend = answering("Hello")

    def fail(_backend: ScriptedBackend) -> None:
        raise RuntimeError("the device is gone")

    backend.on_decode = fail
    async with client_and_service(backend, on_engine_failure="stay") as (client, service):
        asked = Gated(service, 10**6)
        made = await begin(client, [line(n) for n in range(40)])
        await until(lambda: asked.n_asked > 80)
        now = await shown(client, made["id"])
        assert now["status"] == "in_progress"
        assert now["request_counts"] == {"total": 40, "completed": 0, "failed": 0}


async def test_a_batch_waits_while_its_key_is_not_in_the_file(tmp_path: Path, soon: None) -> None:
    keys, both = tmp_path / "keys.toml", table("one", "1") + table("two", "2")
    keys.write_text(both)

    async def change(text: str) -> None:
        replace(keys, text)
        answer = await client.get("/v1/batches", headers={"Authorization": "Bearer unknown"})
        assert answer.status_code == 401  # after a look at the file

    config: dict[str, Any] = {"keys_file": str(keys), "parallel": 1}
    async with client_and_service(answering("Hello"), **config) as (client, service):
        client.headers["Authorization"] = "Bearer 1"
        asked = Gated(service, 3)
        made = await begin(client, [line(n) for n in range(12)])
        await until(lambda: asked.n_asked > 3)
        await change(table("two", "2"))
        asked.opened.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert asked.n_asked < 12 and service.batches._running
        await change(both)  # which wakes it, although no client shows the key
        await until(lambda: not service.batches._running)
        over = await shown(client, made["id"])
        assert over["request_counts"] == {"total": 12, "completed": 12, "failed": 0}


# -- a full store


async def test_a_batch_expires_in_a_full_store(tmp_path: Path) -> None:
    path, body = str(tmp_path / "a.db"), {"max_tokens": 1}
    async with client_and_service(store=path) as (client, service):
        service.reply_to = never
        made = await begin(client, [line(n, **body) for n in range(2000)])
        await client.delete(f"/v1/files/{made['input_file_id']}")

    def fill(records: Records) -> None:
        batch = expire(records)
        (held,) = records.connection.execute("SELECT sum(size) FROM sizes").fetchone()
        n_free = 2**20 - held - 100
        records.append(batch.id, PENDING, [Part.of(10**6, "", {"custom_id": "x" * n_free})])

    async with open_store(path) as store:
        await store.do(fill)
    async with client_of(store=path, store_size=2**20) as client:
        over = await until_over(client, made["id"])
        assert over["status"] == "expired" and over["request_counts"]["failed"] == 2001
        errors = await lines_of(client, over["error_file_id"])
        assert errors and {each["error"]["code"] for each in errors} == {"batch_expired"}


async def test_open_batches_of_one_key_leave_room_for_other_keys() -> None:
    async with client_and_service(api_keys=("1", "2"), store_size=2**20) as (client, service):
        service.reply_to = never
        client.headers["Authorization"] = "Bearer 1"
        lines = file_of([line(n, "x" * 1000) for n in range(100)])
        statuses = []
        for _ in range(12):
            file = await upload(client, lines)
            wanted = {"input_file_id": file, "endpoint": CHATS}
            statuses.append((await client.post("/v1/batches", json=wanted)).status_code)
        assert statuses[:3] == [200] * 3 and statuses[-1] == 503
        client.headers["Authorization"] = "Bearer 2"
        asked = {"input": "Hi", "store": True}
        assert (await client.post("/v1/responses", json=asked)).status_code == 200
        assert (await begin(client, [line(0)]))["status"] == "in_progress"


async def test_background_responses_of_one_key_leave_room_for_other_keys() -> None:
    keys = {"api_keys": ("1", "2"), "max_queue": 100}
    async with client_and_service(endless(), store_size=2**20, **keys) as (client, _):
        client.headers["Authorization"] = "Bearer 1"
        asked = {"input": "x" * 90_000, "background": True}
        statuses = [(await client.post("/v1/responses", json=asked)).status_code for _ in range(6)]
        assert statuses == [200] * 5 + [503]
        client.headers["Authorization"] = "Bearer 2"
        asked = {"input": "Hi", "background": True}
        assert (await client.post("/v1/responses", json=asked)).status_code == 200


async def test_a_line_that_takes_too_much_memory_has_an_error() -> None:
    lines = [line(0, made_up=[1] * 30_000), line(1)]
    async with client_of(answering("Hello"), max_request_memory=2**20) as client:
        over = await until_over(client, (await begin(client, lines))["id"])
        (error,) = await lines_of(client, over["error_file_id"])
        assert (error["custom_id"], error["response"]["status_code"]) == ("line-0", 413)
        assert error["response"]["body"]["error"]["code"] == 413
        assert len(await lines_of(client, over["output_file_id"])) == 1
