"""Reads of the store: as much as requests show, counted in their memory, in turns."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from structlog.testing import capture_logs

from tests.support.clients import client_of
from tests.support.http_server import connected, serving_script
from tests.support.scripts import answering
from tests.support.stored import RESPONSES, begin, line, upload
from tests.support.waiting import until
from trioserve.store import records as records_module

CONVERSATIONS, FILES = "/v1/conversations", "/v1/files"


def item(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def stored(client: httpx.AsyncClient, **conversation: Any) -> str:
    return str((await client.post(CONVERSATIONS, json=conversation)).json()["id"])


async def damage(path: Path, text: bytes) -> None:
    data = await trio.Path(path).read_bytes()
    assert text in data
    await trio.Path(path).write_bytes(data.replace(text, b"\xff" * len(text)))


async def test_a_page_reads_only_its_items(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with client_of(answering("Hello"), store=str(path)) as client:
        items = [item(f"Hi {n}.") for n in range(5)]
        conversation = await stored(client, items=items)
        ids: list[str] = []
        for n in range(3):
            body: dict[str, Any] = {"input": f"Ho {n}."}
            if ids:
                body["previous_response_id"] = ids[-1]
            ids.append((await client.post(RESPONSES, json=body)).json()["id"])
    await damage(path, b'"content":"Hi 4."')
    await damage(path, b'"text":"Ho 0."')
    async with client_of(store=str(path)) as client:
        for place in (
            f"{CONVERSATIONS}/{conversation}/items",
            f"{RESPONSES}/{ids[-1]}/input_items",
        ):
            order = "asc" if "conv" in place else "desc"
            first = (await client.get(f"{place}?order={order}&limit=2")).json()
            assert len(first["data"]) == 2 and first["has_more"] is True
            rest = f"{place}?order={order}&limit=3&after={first['last_id']}"
            answer = await client.get(rest)
            assert answer.json()["error"]["code"] == "store_failed"  # the last one is damaged
            second = (await client.get(rest.replace("limit=3", "limit=2"))).json()
            assert len(second["data"]) == 2 and second["has_more"] is True


async def test_pages_of_a_history_follow_one_another() -> None:
    async with client_of(answering("Hello")) as client:
        id_: str | None = None
        for n in range(3):
            body = {"input": f"Ho {n}.", **({"previous_response_id": id_} if id_ else {})}
            id_ = (await client.post(RESPONSES, json=body)).json()["id"]
        place = f"{RESPONSES}/{id_}/input_items"
        for order in ("asc", "desc"):
            whole = (await client.get(f"{place}?order={order}")).json()["data"]
            assert len(whole) == 5
            found, query = [], f"order={order}&limit=2"
            while True:
                page = (await client.get(f"{place}?{query}")).json()
                found += page["data"]
                if not page["has_more"]:
                    break
                query = f"order={order}&limit=2&after={page['last_id']}"
            assert found == whole


async def test_items_are_counted_before_they_are_read(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with client_of(store=path) as client:
        items = [item("x" * 100_000) for _ in range(10)]
        place = f"{CONVERSATIONS}/{await stored(client, items=items)}/items"
        wanted = {
            "input_file_id": await upload(client, bytes(2**20 + 2**19)),
            "endpoint": "/v1/completions",
        }
    async with client_of(store=path, max_request_memory=2**21) as client:
        assert (await client.get(f"{place}?limit=2")).status_code == 200
        assert (await client.get(place)).status_code == 413
        assert (await client.post("/v1/batches", json=wanted)).status_code == 413


# -- downloads


async def test_a_download_that_is_not_read_holds_one_piece(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with client_of(store=path) as client:
        place = f"{FILES}/{await upload(client, bytes(16 * 2**20))}/content"
    limit = 3 * 2**19  # one piece, and half of another one
    async with (
        serving_script(store=path, max_request_memory=limit) as (url, service),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        connected(url) as unread,
    ):
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await unread.send_all(f"GET {place} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await until(lambda: service.memory.n_held >= 2**20)
        assert (await client.get(place)).status_code == 503
        assert service.memory.n_held <= limit


async def test_a_file_that_is_deleted_ends_its_download() -> None:
    async with client_of() as client:
        id_ = await upload(client, bytes(16 * 2**20))
        async with client.stream("GET", f"{FILES}/{id_}/content") as answer:
            parts = answer.aiter_raw()
            await anext(parts)
            assert (await client.delete(f"{FILES}/{id_}")).status_code == 200
            with capture_logs() as logs, pytest.raises(httpx.TransportError):
                async for _ in parts:
                    pass
    told = [line for line in logs if line["log_level"] != "info"]
    assert [(line["event"], "deleted" in line["error"]) for line in told] == [
        ("a response broke off", True)
    ]


# -- limits


@pytest.mark.parametrize("how", ["background", "store"])
async def test_a_record_that_is_too_large_is_refused_before_the_work(how: str) -> None:
    async with client_of() as client:
        body = {"input": "Hi", "instructions": "x" * 5_000_000, how: True}
        answer = await client.post(RESPONSES, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "record_too_large")


async def test_a_batch_may_be_larger_than_one_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records_module, "MAX_WRITE", 2**19)
    monkeypatch.setattr(records_module, "_PIECE", 2**18)
    async with client_of(answering("Hello")) as client:
        made = await begin(client, [line(n, "x" * 1000) for n in range(1000)])
        assert made["request_counts"]["total"] == 1000
        assert (await client.post(f"/v1/batches/{made['id']}/cancel")).status_code == 200
