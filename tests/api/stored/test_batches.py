"""Batches: OpenAI's SDK, their order and place behind other requests, restarts and cancels."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio
import trio.testing

from tests.server.test_keys import table
from tests.support.clients import client_and_service, client_of, use_openai
from tests.support.event_source import gated
from tests.support.fake_fleet import routed
from tests.support.scripts import answering, noting
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
from trioserve.api.service import AppState
from trioserve.concurrency import Phase


async def test_the_sdk_runs_a_batch() -> None:
    def use(client: openai.OpenAI) -> None:
        lines = [*(line(n) for n in range(10)), line(10, temperature="hot")]
        file = client.files.create(file=io.BytesIO(file_of(lines)), purpose="batch")
        assert (file.purpose, file.bytes) == ("batch", len(file_of(lines)))
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint=CHATS,
            completion_window="24h",
            metadata={"a": "b"},
        )
        while batch.status == "in_progress":
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.metadata == {"a": "b"}
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (11, 10, 1)
        assert batch.output_file_id is not None and batch.error_file_id is not None
        answers = [json.loads(e) for e in client.files.content(batch.output_file_id).iter_lines()]
        assert [each["custom_id"] for each in answers] == [f"line-{n}" for n in range(10)]
        body = answers[0]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "Hello"
        assert answers[0]["response"]["status_code"] == 200 and answers[0]["error"] is None
        (failed,) = client.files.content(batch.error_file_id).iter_lines()
        assert json.loads(failed)["response"]["body"]["error"]["param"] == "temperature"
        assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
        names = {each.id for each in client.files.list()}
        assert names == {file.id, batch.output_file_id, batch.error_file_id}
        assert client.files.delete(file.id).deleted is True
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        with pytest.raises(openai.BadRequestError, match="is completed"):
            client.batches.cancel(batch.id)

    await use_openai(answering("Hello"), use)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi", "stream": True, "background": True}),
    ],
)
async def test_other_endpoints(endpoint: str, body: dict[str, Any]) -> None:
    async with client_of(answering("Hello")) as client:
        lines = [{"custom_id": "a", "url": endpoint, "body": body}]
        over = await until_over(client, (await begin(client, lines, endpoint))["id"])
        (answer,) = await lines_of(client, over["output_file_id"])
        made = answer["response"]["body"]
        assert made["object"] in ("text_completion", "response")
        if endpoint == "/v1/responses":
            assert (await client.get(f"{endpoint}/{made['id']}")).json() == made


async def test_lines_with_the_same_beginning_follow_one_another() -> None:
    backend, prompts = noting("Yes", n_slots=1)
    shared = ["A" * 2000, "B" * 2000]
    lines = [line(n, shared[n % 2] + f" question {n}") for n in range(12)]
    async with client_of(backend, parallel=1) as client:
        over = await until_over(client, (await begin(client, lines))["id"])
        assert over["request_counts"]["completed"] == 12
    kinds = ["A" * 9 in prompt for prompt in prompts]
    assert kinds in ([True] * 6 + [False] * 6, [False] * 6 + [True] * 6)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (b"{", None),
        (b"[]", None),
        ({**line(1), "custom_id": 7}, "custom_id"),
        ({**line(1), "custom_id": "line-0"}, "custom_id"),
        ({**line(1), "method": "GET"}, "method"),
        ({**line(1), "url": "/v1/embeddings"}, "url"),
        ({**line(1), "body": "Hi"}, "body"),
    ],
)
async def test_a_wrong_line_fails_the_batch(wrong: Any, param: str | None) -> None:
    async with client_of() as client:
        made = await begin(client, [line(0), b"", wrong])
        assert made["status"] == "failed"
        (error,) = made["errors"]["data"]
        assert (error["line"], error["param"]) == (3, param)


async def test_invalid_batches_are_refused() -> None:
    async with client_of() as client:
        empty = await begin(client, [])
        assert empty["errors"]["data"][0]["code"] == "empty_file"
        sound = {"input_file_id": await upload(client, file_of([line(0)])), "endpoint": CHATS}
        for name, value in (
            ("input_file_id", "file-none"),
            ("endpoint", "/v1/images"),
            ("completion_window", "1h"),
        ):
            answer = await client.post("/v1/batches", json={**sound, name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        answer = await client.post(
            "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.png", b"x")}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "purpose")


async def test_a_cancelled_batch_keeps_its_answers() -> None:
    backend, gate = gated("Hello", n_slots=1)
    async with client_and_service(backend, parallel=1) as (client, service):
        made = await begin(client, [line(n) for n in range(20)])
        gate.allow(30)
        await until(lambda: _n_done(client, made["id"], 2))
        cancelled = (await client.post(f"/v1/batches/{made['id']}/cancel")).json()
        assert cancelled["status"] == "cancelling"
        gate.open()
        over = await until_over(client, made["id"])
        assert over["status"] == "cancelled" and over["cancelled_at"]
        answers = await lines_of(client, over["output_file_id"])
        assert len(answers) == over["request_counts"]["completed"] < 20
        await until(lambda: not service.batches._running)


async def _n_done(client: httpx.AsyncClient, id_: str, n: int) -> bool:
    return bool((await shown(client, id_))["request_counts"]["completed"] >= n)


async def test_a_restart_continues_with_the_pending_lines(tmp_path: Path) -> None:
    backend, gate = gated("Hello", n_slots=1)
    lines = [line(n, f"question {n}") for n in range(12)]
    config: Mapping[str, Any] = {"store": str(tmp_path / "a.db"), "parallel": 1}

    async def open_at_the_end(service: AppState) -> None:
        await until(lambda: service.batches._jobs.gate.phase.value is Phase.CLOSED)
        gate.open()

    async with (
        trio.open_nursery() as nursery,
        client_and_service(backend, **config) as (client, service),
    ):
        made = await begin(client, lines)
        gate.allow(30)
        await until(lambda: _n_done(client, made["id"], 3))
        nursery.start_soon(open_at_the_end, service)
    backend, prompts = noting("Hello", n_slots=1)
    async with client_of(backend, **config) as client:
        over = await until_over(client, made["id"])
        assert over["status"] == "completed"
        answers = await lines_of(client, over["output_file_id"])
        assert [each["custom_id"] for each in answers] == [f"line-{n}" for n in range(12)]
        assert 0 < len(prompts) <= 9


async def test_after_a_restart_a_batch_waits_for_its_key_of_a_file(tmp_path: Path) -> None:
    """The file has hashes, and lines are answered for the key itself."""
    keys = tmp_path / "keys.toml"
    keys.write_text(table("one", "1") + table("two", "2"))
    config: Mapping[str, Any] = {"store": str(tmp_path / "a.db"), "keys_file": str(keys)}
    async with client_and_service(**config) as (client, service):
        service.reply_to = never
        client.headers["Authorization"] = "Bearer 1"
        made = await begin(client, [line(0)])
    async with client_and_service(answering("Hello"), **config) as (client, service):
        client.headers["Authorization"] = "Bearer 2"
        assert (await client.get("/v1/batches")).json()["data"] == []
        await until(lambda: service.batches._running)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert service.keys.shown.value == {"2"} and not service.batches._places.n_held
        client.headers["Authorization"] = "Bearer 1"
        over = await until_over(client, made["id"])
        assert over["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_batch_whose_window_is_over_expires(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with client_and_service(store=path) as (client, service):
        Asked(service, lambda n: 200 if n == 1 else 500)
        id_ = (await begin(client, [line(n) for n in range(3)]))["id"]
        await until(lambda: _n_done(client, id_, 1))
        files = (await client.get("/v1/files")).json()["data"]
        assert [each["purpose"] for each in files] == ["batch"]  # the output is not whole
        await service.store.do(expire)
    async with client_of(store=path) as client:
        over = await until_over(client, id_)
        assert over["status"] == "expired" and over["expired_at"]
        assert over["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        errors = await lines_of(client, over["error_file_id"])
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        assert len(await lines_of(client, over["output_file_id"])) == 1
        size = (await client.get(f"/v1/files/{over['output_file_id']}")).json()["bytes"]
        content = await client.get(f"/v1/files/{over['output_file_id']}/content")
        assert size == len(content.content) > 0


# -- the place of a batch


@pytest.mark.parametrize(("order", "lowest"), [("higher-first", -100), ("lower-first", 100)])
async def test_lines_have_the_lowest_priority_beside_other_requests(
    order: Any, lowest: int
) -> None:
    async with client_and_service(priority_order=order) as (client, service):
        asked = Asked(service)
        over = await until_over(client, (await begin(client, [line(n) for n in range(5)]))["id"])
        assert over["request_counts"]["completed"] == 5
        assert {each["priority"] for each in asked.bodies} == {lowest}


async def test_a_router_runs_batches() -> None:
    async with routed({"a": answering("Hello")}) as router:
        lines = [line(n, model="a") for n in range(4)]
        over = await until_over(router.client, (await begin(router.client, lines))["id"])
        assert over["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
