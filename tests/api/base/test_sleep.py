"""A server that sleeps, as clients see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.support.clients import sleeper
from tests.support.http_server import serving
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripted_server import ScriptedLoader
from tests.support.scripts import CHAT
from tests.support.sleepers import wake
from tests.support.waiting import patiently
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.testing import ScriptedBackend
from trioserve.types import AdapterInfo


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look at all objects of the tests again and again."""
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)


def make_backend() -> ScriptedBackend:
    return ScriptedBackend(adapters=[AdapterInfo(path="a.gguf", scale=1.0)])


async def test_status_requests_do_not_wake_the_model() -> None:
    loader = ScriptedLoader()
    paths = (
        *("/health", "/health/live", "/health/ready", "/props", "/models", "/v1/models"),
        *("/v1/models/scripted", "/metrics", "/slots", "/slots?queue=1", "/openapi.json"),
        *("/api/tags", "/api/ps", "/api/version"),
    )
    async with sleeper(loader, metrics_endpoint=True) as (client, server):
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.text)
        props = (await client.get("/props")).json()
        assert props["is_sleeping"] is True
        assert props["total_slots"] == 2
        assert props["default_generation_settings"]["n_ctx"] == 1024
        assert [slot["is_processing"] for slot in (await client.get("/slots")).json()] == [
            False
        ] * 2
        assert server.lifecycle.sleeping
    assert loader.n_begun == 1


WAKING: list[tuple[str, Any]] = [
    ("/completion", {"prompt": "a"}),
    ("/completion", {"prompt": "a", "stream": True}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ("/api/chat", CHAT),
    ("/api/chat", {}),
    ("/api/generate", {"prompt": "a"}),
    ("/tokenize", {"content": "a", "with_pieces": True}),
    ("/detokenize", {"tokens": [97]}),
    ("/apply-template", CHAT),
    ("/v1/chat/completions/input_tokens", CHAT),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/v1/messages/count_tokens", CHAT),
    ("/slots/0?action=erase", {}),
    ("/lora-adapters", [{"id": 0, "scale": 0.5}]),
    ("/lora-adapters", None),
]


async def test_requests_wake_the_model(tmp_path: Path) -> None:
    loader = ScriptedLoader(make_backend)
    async with sleeper(loader, slot_save_path=str(tmp_path)) as (client, server):
        for n, (path, body) in enumerate(WAKING, 2):
            method = "GET" if body is None else "POST"
            answer = await client.request(method, path, json=body)
            assert answer.status_code == 200, answer.text
            assert not server.lifecycle.sleeping
            assert len(loader.backends) == n, path
            assert (await client.get("/props")).json()["is_sleeping"] is False
            await server.sleep()


async def test_embeddings_wake_it() -> None:
    loads: list[ScriptedEmbedder] = []

    def load(config: Config, *, progress: object = None) -> ScriptedEmbedder:
        loads.append(ScriptedEmbedder())
        return loads[-1]

    async with sleeper(load, embeddings=True) as (client, server):
        refused = await client.post("/completion", json={"prompt": "a"})
        assert refused.status_code == 501
        refused = await client.post("/rerank", json={"query": "a", "documents": ["b"]})
        assert refused.status_code == 501
        assert server.lifecycle.sleeping
        for path in ("/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings"):
            body = {"input": "a", "prompt": "a", "keep_alive": 0}
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            await server.lifecycle.state.wait_value(ServerState.SLEEPING)
    assert len(loads) == 5


async def test_invalid_requests_do_not_wake_the_model() -> None:
    async with sleeper(ScriptedLoader()) as (client, server):
        for path, body in (
            ("/completion", {"prompt": "a", "temperature": "hot"}),
            ("/completion", {"prompt": "a", "keep_alive": "5 minutes"}),
            ("/completion", {"prompt": "a", "n": 257}),
            ("/v1/chat/completions", {"messages": 5}),
            ("/v1/embeddings", {"input": "a"}),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),  # its vocabulary cannot
            ("/tokenize", {"content": 5}),
            ("/api/chat", {**CHAT, "options": {"num_ctx": 0}}),
            ("/api/chat", {**CHAT, "keep_alive": []}),
            ("/api/chat", {**CHAT, "think": "high"}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code in (400, 501), answer.text
            assert server.lifecycle.sleeping


async def test_a_request_says_how_long_it_stays_awake() -> None:
    loader = ScriptedLoader()
    waits: tuple[tuple[Any, bool], ...] = ((0, False), ("0s", True), (0.05, True), ("50ms", False))
    async with sleeper(loader) as (client, server):
        for n, (keep_alive, stream) in enumerate(waits, 2):
            body = {"prompt": "a", "stream": stream, "keep_alive": keep_alive}
            answer = await client.post("/completion", json=body)
            assert answer.status_code == 200
            assert '"content":"A"' in answer.text
            with patiently():
                await server.lifecycle.state.wait_value(ServerState.SLEEPING)
            assert len(loader.backends) == n


@pytest.mark.system
async def test_a_client_that_leaves_while_it_wakes() -> None:
    loader = ScriptedLoader()
    async with sleeper(loader) as (client, _):
        loader.may_go_on.clear()
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/completion", json={"prompt": "a"}, timeout=0.2)
        loader.may_go_on.set()
        answer = await client.post("/completion", json={"prompt": "b"})
        assert answer.json()["content"] == "B"
        assert loader.backends[1].n_decodes == 2  # of this request alone
    assert len(loader.backends) == 2


async def test_the_deadline_of_a_request_holds_while_it_wakes() -> None:
    loader = ScriptedLoader()
    async with sleeper(loader) as (client, _):
        loader.may_go_on.clear()
        body = {"prompt": "a", "timeout": 0.1}
        answer = await client.post("/completion", json=body)
        loader.may_go_on.set()
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"


async def test_a_model_that_cannot_be_loaded_again() -> None:
    loader = ScriptedLoader()
    async with sleeper(loader) as (client, _):
        loader.failure = "the file is gone"
        for _ in range(2):
            answer = await client.post("/completion", json={"prompt": "a"})
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the file is gone"
        assert (await client.get("/health")).status_code == 200
        loader.failure = ""
        answer = await client.post("/completion", json={"prompt": "a"})
        assert answer.json()["content"] == "A"
    assert loader.n_begun == 4


async def test_a_stream_that_has_ended_does_not_keep_it_awake() -> None:
    loader = ScriptedLoader()
    async with sleeper(loader) as (client, server):
        headers = {"Prefer": "respond-async"}
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 202
        await server.sleep()  # once it has ended
        stream = await client.get(answer.headers["Location"])
        assert "data: [DONE]" in stream.text
        assert "error" not in stream.text
    assert len(loader.backends) == 2


async def test_a_failed_engine_of_a_later_load_ends_the_service() -> None:
    loader = ScriptedLoader()
    app = create_app(Config(stream_interval_ms=0), load=loader)
    service = app.extensions["trioserve"]

    def fail(backend: ScriptedBackend) -> None:
        raise ZeroDivisionError

    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="engine"), flatten_subgroups=True):
        async with serving(app) as url:
            await service.wait_loaded()
            await service.server.sleep()
            await wake(service.server)
            loader.backends[1].on_decode = fail
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                answer = await client.post("/completion", json={"prompt": "a"})
                assert answer.status_code == 500
                await service.wait_ended()
                await trio.sleep_forever()
