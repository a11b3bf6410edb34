"""`/v1/usage` and the metrics of usage: who sees what, with one model and with a router."""

from __future__ import annotations

import re
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.server.test_keys import table
from tests.support.clients import client_and_service, client_of
from tests.support.fake_fleet import routed
from tests.support.scripted_server import assert_at_rest
from tests.support.scripts import answering
from tests.support.waiting import PATIENCE, until
from trioserve.api.service import AppState
from trioserve.children.reports import KeyUsage
from trioserve.store.usage import UsageRow, Used, day_of
from trioserve.testing import ScriptedBackend

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(
        table("chat", "c", "tokens-per-day = 1000") + table("admin", "a", "manage = true")
    )
    return str(path)


async def ask(
    client: httpx.AsyncClient, key: str, path: str = "/v1/usage", body: Any = None
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    if body is None:
        return await client.get(path, headers=headers)
    return await client.post(path, json=body, headers=headers)


def record(state: AppState, day: str, key: str, model: str, n: int) -> None:
    state.usage.add(UsageRow(day, key, model), Used(1, n, 1, 2, 0.25))


async def test_a_request_of_each_api_is_counted_for_its_key(keys: str) -> None:
    async with client_and_service(keys_file=keys, metrics_endpoint=True) as (client, service):
        answer = await ask(client, "c", "/v1/chat/completions", CHAT)
        told = answer.json()["usage"]
        body = {**CHAT, "options": {"num_predict": 2}, "stream": False}
        assert (await ask(client, "a", "/api/chat", body)).status_code == 200
        assert (await ask(client, "a", "/v1/messages", CHAT)).status_code == 200
        (own,) = (await ask(client, "c")).json()["data"]
        assert own["requests"] == 1 and own["output_tokens"] == told["completion_tokens"]
        assert own["input_tokens"] == told["prompt_tokens"] and own["seconds"] > 0
        assert own["key"] is None and own["model"] is None
        both = (await ask(client, "a", "/v1/usage?group_by=key")).json()["data"]
        assert [(one["key"], one["requests"]) for one in both] == [("admin", 2), ("chat", 1)]
        text = (await ask(client, "a", "/metrics")).text
        model = service.server.model.info.name
        assert f'trioserve:usage_requests_total{{key="admin",model="{model}"}} 2.0' in text
        assert 'trioserve:usage_output_tokens_total{key="chat"' in text


async def test_metrics_show_the_usage_of_a_key_and_to_managers_of_all_keys(keys: str) -> None:
    async def names(client: httpx.AsyncClient, key: str, path: str = "/metrics") -> set[str]:
        text = (await ask(client, key, path)).text
        assert "trioserve:http_answers_total" in text or "model=" in path
        return {*re.findall('key="([^"]*)"', text)}

    settings: dict[str, Any] = {"keys_file": keys, "metrics_endpoint": True}
    async with client_and_service(**settings) as (client, service):
        for key in ("admin", "chat", "other"):
            record(service, "2026-01-01", key, "m", 1)
        assert await names(client, "c") == {"chat"}
        assert await names(client, "a") == {"admin", "chat", "other"}
    async with routed(child=settings, **settings) as router:
        for key in ("admin", "chat", "other"):
            record(router.service, "2026-01-01", key, "one", 1)
        assert await names(router.client, "c") == {"chat"}
        assert await names(router.client, "a") == {"admin", "chat", "other"}
        assert await names(router.client, "a", "/metrics?model=one") == set()
        of_json = await ask(router.client, "c", "/v1/metrics")
        assert of_json.status_code == 200 and "other" not in of_json.text


async def test_without_keys_all_usage_is_of_nobody() -> None:
    async with client_of() as client:
        await client.post("/completion", json={"prompt": "a", "n_predict": 2})
        (one,) = (await client.get("/v1/usage?group_by=key")).json()["data"]
        assert (one["key"], one["requests"], one["output_tokens"]) == ("", 1, 2)


async def test_days_and_groups(keys: str) -> None:
    async with client_and_service(keys_file=keys) as (client, service):
        for day, n in (("2026-01-01", 10), ("2026-01-02", 20)):
            for key in ("admin", "chat"):
                record(service, day, key, "m", n)
        record(service, "2026-01-02", "chat", "other", 7)

        async def rows(query: str, *names: str) -> list[tuple[Any, ...]]:
            found = (await ask(client, "a", f"/v1/usage?{query}")).json()["data"]
            return [tuple(one[name] for name in names) for one in found]

        days = "start=2026-01-01&end=2026-01-31"
        assert await rows(days, "day", "input_tokens") == [("2026-01-01", 20), ("2026-01-02", 47)]
        assert await rows(f"{days}&group_by=model,key", "model", "key", "input_tokens") == [
            ("m", "admin", 30), ("m", "chat", 30), ("other", "chat", 7),
        ]  # fmt: skip
        assert await rows("start=2026-01-02&end=2026-01-02", "requests", "seconds") == [(3, 0.75)]
        assert await rows("end=2026-01-01", "cached_input_tokens") == [(2,)]
        own = (await ask(client, "c", f"/v1/usage?{days}&group_by=key")).json()["data"]
        assert [(one["key"], one["requests"]) for one in own] == [("chat", 3)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("start=yesterday", "start"),
        ("end=2026-02-30", "end"),
        ("start=2026-02-02&end=2026-02-01", "start"),
        ("group_by=owner", "group_by"),
        ("limit=0", "limit"),
        ("after=alice", "after"),
        ("group_by=day,key&after=usage_2026-01-01", "after"),
    ],
)
async def test_wrong_parameters(query: str, param: str) -> None:
    async with client_of() as client:
        answer = await client.get(f"/v1/usage?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("day", ["0001-01-01", "0999-12-31", "2026-01-31", "9999-12-31"])
async def test_any_day_that_exists_is_taken(day: str) -> None:
    async with client_and_service() as (client, service):
        record(service, day, "", "m", 1)
        for query in (f"end={day}", f"start={day}&end={day}", f"start=0001-01-01&end={day}"):
            answer = await client.get(f"/v1/usage?{query}")
            assert answer.status_code == 200, (query, answer.text)
            told = answer.json()
            assert told["end"] == day and len(told["start"]) == 10
            assert [one["day"] for one in told["data"]] == [day]
        answer = await client.get("/v1/usage?start=9999-12-31&end=0001-01-01")
        assert answer.status_code == 400


async def test_usage_comes_in_pages() -> None:
    async with client_and_service() as (client, service):
        days = [f"2026-01-{n:02}" for n in range(1, 31)]
        for day in days:
            for key in ("", "a", "b", "c", "d"):
                record(service, day, key, "x/y", 1)

        async def pages(query: str) -> list[list[tuple[str, str]]]:
            found, after = [], ""
            while True:
                answer = await client.get(
                    f"/v1/usage?start=2026-01-01&end=2026-01-31&{query}&after={after}"
                )
                told = answer.json()
                found.append([(one["day"], one["key"]) for one in told["data"]])
                if not told["has_more"]:
                    return found
                after = told["last_id"]

        first, second = await pages("group_by=day,key")
        assert (len(first), len(second)) == (100, 50) and first + second == sorted(first + second)
        assert len({*first, *second}) == 150
        groups = "limit=2&group_by=key"
        keys = [[key for _, key in page] for page in await pages(groups)]
        assert keys == [["", "a"], ["b", "c"], ["d"]]
        keys = [[key for _, key in page] for page in await pages(f"{groups}&order=desc")]
        assert keys == [["d", "c"], ["b", "a"], [""]]
        (whole,) = await pages("limit=1000&group_by=model,key,day")
        assert await pages("limit=75&group_by=model,key,day") == [whole[:75], whole[75:]]


@pytest.mark.parametrize("in_router", [False, True])
async def test_waiting_requests_are_refused_when_the_budget_is_used_up(
    tmp_path: Path, in_router: bool
) -> None:
    path, may_go_on = tmp_path / "keys.toml", threading.Event()
    path.write_text(table("chat", "c", "tokens-per-day = 300") + table("other", "o"))
    backend = answering("x" * 1000, n_slots=2)

    def hold(_: object) -> None:
        may_go_on.wait(PATIENCE)

    backend.on_decode = hold
    settings: dict[str, Any] = {"keys_file": str(path)}
    answers: list[httpx.Response] = []

    async with AsyncExitStack() as stack:
        if in_router:
            opened = routed({"one": backend}, child=settings, **settings)
            router = await stack.enter_async_context(opened)
            client, server = router.client, router.processes["one"].server
        else:
            client, service = await stack.enter_async_context(
                client_and_service(backend, **settings)
            )
            server = service.server

        async def chat(key: str, stream: bool) -> None:
            body = CHAT | {"max_tokens": 250, "stream": stream, "return_progress": stream}
            answers.append(await ask(client, key, "/v1/chat/completions", body))

        async with trio.open_nursery() as nursery:
            for i in range(40):
                nursery.start_soon(chat, "c", i % 2 == 1)
            dispatcher = server.lifecycle.services.dispatcher
            await until(lambda: len(dispatcher) == 40)
            may_go_on.set()
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) == 38
        for answer in refused:
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "insufficient_quota"
        (used,) = server.resources.usage.totals.values()
        assert used.output_tokens == 500 and used.input_tokens < 300
        await chat("o", False)
        assert answers[-1].status_code == 200
        await assert_at_rest(server)


async def test_a_router_counts_the_usage_of_its_models_and_keeps_budgets(keys: str) -> None:
    async with routed(keys_file=keys, child={"keys_file": keys}) as router:
        assert router.fleet.on_usage is not None
        assert (await ask(router.client, "c", "/v1/chat/completions", CHAT)).status_code == 200
        await until(lambda: router.service.usage.totals)
        (one,) = (await ask(router.client, "c")).json()["data"]
        assert one["requests"] == 1 and one["output_tokens"] == 2
        today = one["day"]
        more = KeyUsage(today, "chat", 1, 1000, 0, 0, 0.0)
        router.fleet.on_usage("another", [more])
        refused = await ask(router.client, "c", "/v1/chat/completions", CHAT)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert (await ask(router.client, "a", "/v1/chat/completions", CHAT)).status_code == 200


async def test_a_router_tells_the_usage_of_all_its_models_itself() -> None:
    async with routed({"one": ScriptedBackend(), "two": None}) as router:
        assert router.fleet.on_usage is not None
        today = day_of(time.time())
        for model in ("one", "two"):
            router.fleet.on_usage(model, [KeyUsage(today, "", 1, 5, 0, 0, 0.0)])
        told = await router.client.get("/v1/usage?group_by=model")
        assert [(each["model"], each["input_tokens"]) for each in told.json()["data"]] == [
            ("one", 5),
            ("two", 5),
        ]
