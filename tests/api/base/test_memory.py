"""The memory of requests over HTTP: bodies that arrive, that are read, and that are pending."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.support.clients import client_and_service
from tests.support.http_server import connected, serving_script
from tests.support.scripts import CHAT, endless
from tests.support.waiting import until
from trioserve.api.service import Service

PREFER = {"Prefer": "respond-async, wait=1"}
MB = 2**20


async def until_held(service: Service, at_least: int, at_most: int) -> None:
    await until(lambda: at_least <= service.memory.n_held <= at_most)


def chat_of(n_bytes: int) -> dict[str, Any]:
    """A chat whose body is long, and its prompt is not."""
    return {**CHAT, "ignored": "x" * n_bytes}


async def test_bodies_that_arrive_are_bounded_in_all() -> None:
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * MB}\r\n\r\n"
    async with serving_script(max_request_memory=4 * MB) as (url, service):
        async with AsyncExitStack() as stack:
            for n in range(1, 4):
                slow = await stack.enter_async_context(connected(url))
                await slow.send_all(head.encode() + b" " * MB)
                await until_held(service, n * MB, n * MB)
            one_more = await stack.enter_async_context(connected(url))
            await one_more.send_all(head.encode() + b" " * (MB + 1))
            answer = await one_more.receive_some()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer.lower()
            await until_held(service, 3 * MB, 3 * MB)
        await until_held(service, 0, 0)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await until_held(service, 0, 0)


async def test_values_count_and_not_their_text_alone() -> None:
    async with client_and_service(max_request_memory=4 * MB) as (client, service):
        body = json.dumps({"prompt": "a", "ignored": [{}] * 50_000})
        answer = await client.post("/completion", content=body)
        assert answer.status_code == 413, answer.text
        assert "bytes of memory" in answer.json()["error"]["message"]
        await until_held(service, 0, 0)


async def test_a_body_that_nobody_reads_is_not_kept() -> None:
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {8 * MB}\r\n\r\n"
    async with serving_script(api_keys=("key",)) as (url, service), connected(url) as stream:
        await stream.send_all(head.encode())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 401")
        await stream.send_all(b" " * 4 * MB)
        assert service.memory.n_held == 0


@pytest.mark.system
async def test_chats_that_wait_for_nobody_are_bounded() -> None:
    async with client_and_service(endless(), max_request_memory=4 * MB) as (client, service):
        statuses, locations = [], []
        for _ in range(6):
            answer = await client.post(
                "/v1/chat/completions", json=chat_of(MB // 2), headers=PREFER
            )
            statuses.append(answer.status_code)
            locations.append(answer.headers.get("Location"))
        assert statuses == [202, 202, 202, 503, 503, 503]
        assert answer.json()["error"]["code"] == "memory_full"
        assert answer.headers["Retry-After"] == "1"
        await until_held(service, 3 * MB, 4 * MB)
        for location in filter(None, locations):
            assert (await client.delete(location)).status_code == 204
        await until_held(service, 0, 0)


@pytest.mark.system
async def test_one_key_leaves_room_for_another() -> None:
    settings = {"api_keys": ("one", "two"), "max_request_memory": 6 * MB}
    async with client_and_service(endless(), **settings) as (client, service):

        async def post(key: str) -> int:
            headers = {**PREFER, "Authorization": f"Bearer {key}"}
            body = chat_of(MB // 2)
            return (
                await client.post("/v1/chat/completions", json=body, headers=headers)
            ).status_code

        assert [await post("one") for _ in range(4)] == [202, 202, 503, 503]
        assert await post("two") == 202
        for session in list(service.streams):
            service.streams.stop(session, "The test is over.")
