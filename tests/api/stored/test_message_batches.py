"""Batches of messages: Anthropic's SDK, cancels, deletes, restarts, and who sees what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.anthropic_api import ASK
from tests.support.clients import client_and_service, client_of, use_anthropic
from tests.support.event_source import gated
from tests.support.scripts import answering
from tests.support.stored import begin as begin_openai, line, never
from tests.support.waiting import until
from trioserve.api.batches import MESSAGES, RESULTS
from trioserve.errors import StoreError
from trioserve.store import Records, Store
from trioserve.store.database import DRAFT

PATH = "/v1/messages/batches"


def asked(n: int, **fields: Any) -> dict[str, Any]:
    return {"custom_id": f"id-{n}", "params": {**ASK, "max_tokens": 8, **fields}}


async def begin(client: httpx.AsyncClient, *requests: Any, **more: Any) -> dict[str, Any]:
    made = await client.post(PATH, json={"requests": [*requests]}, **more)
    assert made.status_code == 200, made.text
    return dict(made.json())


async def until_ended(client: httpx.AsyncClient, id_: str) -> dict[str, Any]:
    body: dict[str, Any] = {}

    async def has_ended() -> bool:
        body.update((await client.get(f"{PATH}/{id_}")).json())
        return body["processing_status"] == "ended"

    await until(has_ended)
    return body


async def results_of(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.get(body["results_url"])
    assert answer.status_code == 200, answer.text
    lines = [json.loads(each) for each in answer.text.splitlines()]
    return {each["custom_id"]: each["result"] for each in lines}


async def test_the_sdk_runs_a_batch() -> None:
    def use(client: anthropic.Anthropic) -> None:
        batches = client.messages.batches
        requests: list[Any] = [asked(0), asked(1), asked(2), asked(3, temperature="hot")]
        batch = batches.create(requests=requests)
        while batch.processing_status != "ended":
            batch = batches.retrieve(batch.id)
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (3, 1, 0)
        assert batch.ended_at is not None and batch.ended_at >= batch.created_at
        found = {each.custom_id: each.result for each in batches.results(batch.id)}
        assert found.keys() == {f"id-{n}" for n in range(4)}
        first, failed = found["id-0"], found["id-3"]
        assert first.type == "succeeded" and first.message.content[0].to_dict()["text"] == "Hello"
        assert failed.type == "errored" and "temperature" in failed.error.error.message
        assert failed.error.error.type == "invalid_request_error"
        assert [each.id for each in batches.list(limit=1)] == [batch.id]
        with pytest.raises(anthropic.BadRequestError, match="is completed"):
            batches.cancel(batch.id)
        assert batches.delete(batch.id).type == "message_batch_deleted"
        for gone in (batches.retrieve, batches.results, batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                gone(batch.id)

    await use_anthropic(answering("Hello"), use)


async def test_pages_go_both_ways() -> None:
    async with client_of(answering("Hello")) as client:
        ids = [(await begin(client, asked(0)))["id"] for _ in range(5)]
        ids.reverse()

        async def page(**query: Any) -> tuple[list[str], bool]:
            body = (await client.get(PATH, params={"limit": 2, **query})).json()
            shown = [each["id"] for each in body["data"]]
            assert (body["first_id"], body["last_id"]) == (shown[0], shown[-1])
            return shown, body["has_more"]

        assert await page() == (ids[:2], True)
        assert await page(after_id=ids[1]) == (ids[2:4], True)
        assert await page(after_id=ids[3]) == (ids[4:], False)
        assert await page(before_id=ids[4]) == (ids[2:4], True)
        assert await page(before_id=ids[1]) == (ids[:1], False)
        for name in ("before_id", "after_id", "page"):
            wrong = await client.get(PATH, params={name: "x"})
            assert wrong.status_code == 400 and f"'{name}'" in wrong.json()["error"]["message"]
        # OpenAI's routes do not see them, and these do not see OpenAI's.
        other = await begin_openai(client, [line(0)])
        assert [each["id"] for each in (await client.get("/v1/batches")).json()["data"]] == [
            other["id"]
        ]
        for path in (f"/v1/batches/{ids[0]}", f"{PATH}/{other['id']}"):
            assert (await client.get(path)).status_code == 404
        await until_ended(client, ids[0])
        files = (await client.get("/v1/files")).json()["data"]
        assert {each["purpose"] for each in files} <= {"batch", "batch_output"}


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests"),
        ("x", "requests"),
        ([{"params": {}}], "requests[0].custom_id"),
        ([asked(0), asked(0)], "requests[1].custom_id"),
        ([asked(0) | {"custom_id": "a b"}], "requests[0].custom_id"),
        ([asked(0) | {"custom_id": "x" * 65}], "requests[0].custom_id"),
        ([asked(0) | {"params": []}], "requests[0].params"),
        ([{}] * 100_001, "requests"),
    ],
)
async def test_invalid_batches_are_refused(requests: Any, param: str) -> None:
    async with client_of(answering("Hello")) as client:
        answer = await client.post(PATH, json={"requests": requests})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and f"'{param}'" in error["message"]
        assert (await client.get(PATH)).json()["data"] == []


async def test_a_cancel_ends_messages_that_have_not_begun() -> None:
    backend, gate = gated("Hello", n_slots=1)
    async with client_of(backend, parallel=1) as client:
        body = await begin(client, *(asked(n) for n in range(20)))
        gate.allow(30)

        async def has_results() -> bool:
            now = (await client.get(f"{PATH}/{body['id']}")).json()["request_counts"]
            return bool(now["succeeded"] >= 2)

        await until(has_results)
        early = await client.get(f"{PATH}/{body['id']}/results")
        assert early.status_code == 400 and early.json()["error"]["type"] == "invalid_request_error"
        assert (await client.delete(f"{PATH}/{body['id']}")).status_code == 400
        made = (await client.post(f"{PATH}/{body['id']}/cancel")).json()
        assert made["processing_status"] == "canceling" and made["cancel_initiated_at"]
        gate.open()
        ended = await until_ended(client, body["id"])
        found = await results_of(client, ended)
        assert len(found) == 20
        counts, kinds = ended["request_counts"], [each["type"] for each in found.values()]
        assert counts["canceled"] == kinds.count("canceled") > 0
        assert counts["succeeded"] == kinds.count("succeeded") >= 2
        assert sum(counts.values()) == 20 and counts["processing"] == 0


async def test_usage_is_that_of_the_key() -> None:
    async with client_of(answering("Hello"), api_keys=("one", "two")) as client:
        client.headers["x-api-key"] = "two"
        ended = await until_ended(client, (await begin(client, asked(0)))["id"])
        assert (await results_of(client, ended))["id-0"]["type"] == "succeeded"
        usage = (await client.get("/v1/usage", params={"group_by": "key"})).json()["data"]
        assert [each["key"] for each in usage] == ["key-2"]


async def test_a_batch_whose_window_is_over_expires(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")

    def expire(records: Records) -> None:
        (batch,) = records.open_ones(MESSAGES)
        records.change(batch.id, {**batch.body, "expires_at": 1}, is_open=True)

    async with client_and_service(store=store) as (client, service):
        service.reply_to = never
        id_ = (await begin(client, asked(0), asked(1)))["id"]
        await service.store.do(expire)
    async with client_of(answering("Hello"), store=store) as client:
        ended = await until_ended(client, id_)
        assert ended["request_counts"]["expired"] == 2
        found = await results_of(client, ended)
        assert found == {f"id-{n}": {"type": "expired"} for n in range(2)}


async def test_nothing_of_a_deleted_batch_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Store, id: str) -> None:
        raise StoreError("The disk is full.")

    def left(records: Records) -> list[Any]:
        found = "SELECT kind, is_open FROM records ORDER BY kind"
        return records.connection.execute(found).fetchall()

    async with client_and_service(answering("Hello")) as (client, service):
        body = await until_ended(client, (await begin(client, asked(0)))["id"])
        with monkeypatch.context() as patch:
            patch.setattr(Store, "delete", broken)
            assert (await client.delete(f"{PATH}/{body['id']}")).status_code == 503
        # The next start deletes what is hidden.
        assert (await client.get(f"{PATH}/{body['id']}")).status_code == 404
        assert await service.store.do(left) == [(RESULTS, DRAFT), (MESSAGES, DRAFT)]
        body = await until_ended(client, (await begin(client, asked(0)))["id"])
        assert (await client.delete(f"{PATH}/{body['id']}")).status_code == 200
        assert len(await service.store.do(left)) == 2
