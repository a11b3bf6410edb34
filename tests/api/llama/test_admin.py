"""Health, models, properties, slots; keys, origins, request ids and errors."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import structlog
import trio
from structlog.testing import capture_logs

from tests.support.clients import client_and_service, client_of, error_body
from tests.support.waiting import patiently
from trioserve.api.edge import access
from trioserve.api.edge.connection import choose_id
from trioserve.testing import ScriptedBackend


async def test_health() -> None:
    async with client_of() as client:
        for path in ("/health", "/v1/health", "/health/ready", "/health/live"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_properties_can_be_set_where_that_is_allowed() -> None:
    async with client_of(props_endpoint=True) as client:
        answer = await client.post("/props", json={"any": "thing"})
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        assert (await client.get("/props")).json()["endpoint_props"] is True
    async with client_of() as client:
        answer = await client.post("/props", json={})
        assert answer.status_code == 501
        assert answer.json()["error"]["message"] == (
            "This server does not support changing global properties. Start it with `--props`"
        )
        assert (await client.get("/props")).json()["endpoint_props"] is False


async def test_health_while_draining() -> None:
    async with client_and_service() as (client, service):
        await service.drain()
        for path in ("/health", "/health/ready"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "unavailable_error"
        assert (await client.get("/health/live")).status_code == 200
        answer = await client.post("/completion", json={"prompt": "a"})
        assert answer.status_code == 503


async def test_an_engine_in_a_step_that_does_not_end() -> None:
    in_step, end = threading.Event(), threading.Event()

    def step(backend: ScriptedBackend) -> None:
        in_step.set()
        end.wait(10)

    backend = ScriptedBackend()
    backend.on_decode = step
    config = {"watchdog_timeout": 0.1, "metrics_endpoint": True}
    async with client_of(backend, **config) as client, trio.open_nursery() as nursery:
        assert (await client.get("/health/live")).status_code == 200  # at rest
        nursery.start_soon(partial(client.post, "/completion", json={"prompt": "a"}))
        await trio.to_thread.run_sync(in_step.wait)
        with patiently():
            while (answer := await client.get("/health/live")).status_code == 200:
                await trio.sleep(0.01)
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "unavailable_error"
            assert (await client.get("/health/ready")).status_code == 200
            assert len((await client.get("/slots")).json()) == 2
            assert "llamacpp:requests_processing 0" in (await client.get("/metrics")).text
            end.set()
            while (await client.get("/health/live")).status_code == 503:
                await trio.sleep(0.01)


async def test_a_broken_engine_is_neither_ready_nor_live() -> None:
    def step(backend: ScriptedBackend) -> None:
        raise RuntimeError("broken")

    backend = ScriptedBackend()
    backend.on_decode = step
    config = {"on_engine_failure": "stay", "metrics_endpoint": True}
    async with client_of(backend, **config) as client:
        with capture_logs():  # tracebacks take long to write
            assert (await client.post("/completion", json={"prompt": "a"})).status_code == 500
        for path in ("/health", "/v1/health", "/health/ready", "/health/live"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "The inference engine failed."
        for path in ("/slots", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_models() -> None:
    async with client_of(alias="one/a, two", tags=("small", "quick")) as client:
        data = (await client.get("/v1/models")).json()
        for same in ("/models", "/v1/models/", "/models/"):
            assert (await client.get(same)).json() == data
        assert data["object"] == "list"
        (model,) = data["data"]
        assert model["id"] == "scripted"
        assert model["object"] == "model"
        assert model["meta"]["n_vocab"] == 257
        assert model["aliases"] == ["one/a", "two"]
        assert model["tags"] == ["small", "quick"]
        assert model["context_length"] == model["max_model_len"] == model["meta"]["n_ctx"] > 0
        assert data["models"][0]["name"] == "scripted"
        for prefix in ("/models", "/v1/models"):
            for name in ("scripted", "one/a", "one%2Fa", "two"):
                assert (await client.get(f"{prefix}/{name}")).json() == model
            answer = await client.get(f"{prefix}/three")
            message = "There is no model 'three' here. The model is 'scripted'."
            wanted = error_body(message, "model", code="model_not_found")
            assert (answer.status_code, answer.json()) == (404, wanted)


async def test_a_slash_at_the_end_of_a_path() -> None:
    async with client_of(ScriptedBackend()) as client:
        assert (await client.get("/health/")).status_code == 200
        answer = await client.post("/v1/completions/", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
        assert (await client.get("/v1/completions/")).status_code in (404, 405)
        for path in ("/v1/models//", "/nothing/"):
            assert (await client.get(path)).status_code == 404


async def test_commands_to_the_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)
    async with client_of() as client:

        async def tell(command: str, name: str) -> int:
            return (await client.post(f"/models/{command}", json={"model": name})).status_code

        async def sleeps() -> bool:
            return bool((await client.get("/props")).json()["is_sleeping"])

        for _ in range(2):
            assert await tell("unload", "scripted") == 200
            assert await sleeps()
        assert await tell("load", "scripted") == 200
        assert not await sleeps()
        assert (await tell("load", "other"), await tell("unload", "other")) == (404, 404)
        for method, path, body in (
            ("POST", "/models", {"model": "a/b"}),
            ("DELETE", "/models?model=scripted", None),
            ("GET", "/models/sse", None),
        ):
            answer = await client.request(method, path, json=body)
            assert answer.status_code == 501
            assert answer.json()["error"]["type"] == "not_supported_error"


async def test_props() -> None:
    async with client_of(parallel=2, n_predict=9) as client:
        data = (await client.get("/props")).json()
    assert data["total_slots"] == 2
    assert data["is_sleeping"] is False
    assert data["modalities"] == {"vision": False, "video": False, "audio": False}
    assert "messages" in data["chat_template"]
    assert data["default_generation_settings"]["n_ctx"] == 1024
    params = data["default_generation_settings"]["params"]
    assert params["n_predict"] == 9
    assert params["temperature"] == 0.8
    assert params["seed"] == 2**32 - 1


async def test_properties_of_the_model() -> None:
    backend = ScriptedBackend(n_ctx_seq=512, chat_template=None)
    async with client_of(backend) as client:
        props = (await client.get("/props")).json()
        (listed,) = (await client.get("/v1/models")).json()["data"]
    for told in (props, listed):
        assert told["has_chat_template"] is False
        assert told["context_advice"].startswith("A request may have 512 tokens, because")
        assert (told["is_toy"], told["example_prompts"], told["suggested_tools"]) == (False, [], [])


# -- keys


async def test_keys() -> None:
    async with client_of(api_keys=("one", "two")) as client:

        async def status(path: str, **headers: str) -> int:
            return (await client.get(path, headers=headers)).status_code

        for path in ("/health", "/v1/health", "/"):
            assert await status(path) == 200
        for path in ("/v1/models", "/props", "/slots", "/nothing"):
            assert await status(path) == 401
        assert await status("/props", Authorization="Bearer two") == 200
        assert await status("/props", **{"x-api-key": "one"}) == 200
        assert await status("/props", Authorization="Bearer three") == 401
        assert await status("/nothing", Authorization="Bearer one") == 404


def test_a_key_in_headers() -> None:
    assert access.key_in("Bearer x", "y") == "x"
    assert access.key_in(None, "y") == "y"
    assert access.key_in("bEARER  x", None) == "x"
    assert access.key_in("Bearer schl\xc3\xbcssel", None) == "schlüssel"


# -- origins


async def test_only_pages_of_this_machine_may_read_answers() -> None:
    async with client_of(api_keys=("key",)) as client:
        for origin, local in (
            ("http://localhost:3000", True),
            ("http://127.0.0.1:5", True),
            ("https://[::1]", True),
            ("http://localhost.evil.example", False),
            ("https://evil.example", False),
            ("null", False),
            ("", False),
            ("http://[", False),
            ("http://[::1].evil.example", False),
            ("http://a@localhost", False),
        ):
            assert access.is_of_this_machine(origin) is local
            answer = await client.options("/v1/chat/completions", headers={"Origin": origin})
            assert answer.status_code == 200
            allowed = answer.headers.get("Access-Control-Allow-Origin")
            assert allowed == (origin if local else None)
            assert ("Access-Control-Allow-Headers" in answer.headers) is local


# -- request ids and errors


async def test_request_ids() -> None:
    async with client_of() as client:
        with capture_logs([structlog.contextvars.merge_contextvars]) as logs:
            answer = await client.post(
                "/completion", json={"prompt": "a"}, headers={"X-Request-Id": "my-id_1.2"}
            )
        assert answer.headers["X-Request-Id"] == "my-id_1.2"
        lines = [line for line in logs if line["event"].startswith("request ")]
        assert [line["request_id"] for line in lines] == ["my-id_1.2"] * 2
        made = [(await client.get("/nope")).headers["X-Request-Id"] for _ in range(2)]
        assert made[0] != made[1]
    assert choose_id("bad id\n") != "bad id\n"
    assert len(choose_id("x" * 129)) < 129
