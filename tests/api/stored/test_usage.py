"""`/v1/usage` and the metrics of usage: who sees what, with one model and with a router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_keys import table
from tests.support.clients import client_and_service, client_of
from tests.support.fake_fleet import routed
from trioserve.api.base.app_state import AppState
from trioserve.server.usage import Usage
from trioserve.store.usage import UsageRow, Used, usage_out

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
    ],
)
async def test_wrong_parameters(query: str, param: str) -> None:
    async with client_of() as client:
        answer = await client.get(f"/v1/usage?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_a_router_has_what_its_models_report_and_keeps_budgets(keys: str) -> None:
    async with routed(keys_file=keys, child={"keys_file": keys}) as router:
        assert router.fleet.on_usage is not None
        of_child = Usage()
        router.children["one"].server.observers.append(of_child)
        assert (await ask(router.client, "c", "/v1/chat/completions", CHAT)).status_code == 200
        told = [usage_out(row, used) for row, used in of_child.take().items()]
        router.fleet.on_usage("one", json.loads(json.dumps(told)))
        (one,) = (await ask(router.client, "c")).json()["data"]
        assert one["requests"] == 1 and one["output_tokens"] == 2
        today = one["day"]
        more = usage_out(UsageRow(today, "chat", "?"), Used(1, 1000))
        router.fleet.on_usage("another", [more])
        refused = await ask(router.client, "c", "/v1/chat/completions", CHAT)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert (await ask(router.client, "a", "/v1/chat/completions", CHAT)).status_code == 200
