"""`keep_alive` as Ollama's clients use it: how long the model stays in memory."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.support.clients import sleeper
from tests.support.ollama_api import ASK
from tests.support.scripted_server import ScriptedLoader
from tests.support.waiting import patiently
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.server.server import Server


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look at all objects of the tests again and again."""
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)


async def until_asleep(server: Server) -> None:
    with patiently():
        await server.lifecycle.state.wait_value(ServerState.SLEEPING)


async def expiry(client: httpx.AsyncClient) -> str | None:
    """Get the time when the model is unloaded, if one is in memory."""
    models = (await client.get("/api/ps")).json()["models"]
    return models[0]["expires_at"] if models else None


async def test_ps_has_the_time_of_unloading() -> None:
    async with sleeper(ScriptedLoader()) as (client, _):
        await client.post("/api/chat", json=ASK | {"keep_alive": "90m"})
        told = await expiry(client)
        expected = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(time.time() + 90 * 60))
        assert told is not None
        assert told[:14] == expected[:14]
        for keep_alive in (-1, 1e12, 1e300):
            await client.post("/api/chat", json=ASK | {"keep_alive": keep_alive})
            assert await expiry(client) == "2318-01-01T00:00:00Z"


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {}), ("/api/generate", {"prompt": ""})])
async def test_a_model_is_loaded_and_unloaded_without_text(path: str, body: Any) -> None:
    loader = ScriptedLoader()
    async with sleeper(loader) as (client, server):
        reasons = []
        for keep_alive in (None, 0, 0):
            answer = await client.post(path, json=body | {"keep_alive": keep_alive})
            assert answer.status_code == 200, answer.text
            reasons.append(answer.json()["done_reason"])
            if keep_alive == 0:
                await until_asleep(server)
        assert reasons == ["load", "unload", "unload"]
    assert loader.n_begun == 2  # what sleeps is not loaded to be unloaded
