"""API keys of a file: what a key may do, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.server.test_keys import replace, table
from tests.support.clients import client_and_service, client_of
from tests.support.fake_fleet import routed
from trioserve.api import App
from trioserve.api.base.routes import Route
from trioserve.app import create_app, create_router
from trioserve.config import Config
from trioserve.models.hub import HubReference
from trioserve.router.downloads import Download
from trioserve.router.states import FleetEvent
from trioserve.testing import ScriptedBackend

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(
        table("chat", "c")
        + table("admin", "a", "manage = true")
        + table("other", "o", 'models = ["another-*"]')
        + table("slow", "s", "requests-per-minute = 1", "tokens-per-minute = 500")
    )
    return file


async def ask(client: httpx.AsyncClient, key: str, **body: object) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=CHAT | body, headers=bearer(key))


# -- management


#: Routes for all keys. The handler of any other route is marked with `manages`.
CLIENTS = {
    "/", "/assets/<name>", "/licenses.txt", "/sw.js", "/openapi.json", "/openapi/<api>.json",
    "/health", "/v1/health", "/health/live", "/health/ready",
    "GET /models", "GET /v1/models", "GET /models/<path:name>", "GET /v1/models/<path:name>",
    "GET /models/sse", "GET /props", "GET /metrics", "GET /v1/metrics", "GET /slots",
    "GET /lora-adapters", "GET /tokenizer_info", "/tools", "/cors-proxy",
    "/api/version", "/api/tags", "/api/ps", "/api/show", "/api/chat", "/api/generate",
    "/api/embed", "/api/embeddings", "/api/web_search", "/api/experimental/web_search",
    "/api/web_fetch", "/api/experimental/web_fetch",
    "/chat/completions", "/chat/completions/input_tokens", "/v1/chat/completions",
    "/v1/chat/completions/input_tokens", "/v1/chat/completions/control",
    "/v1/chat/completions/<id_>/approve", "/v1/chat/completions/<id_>/stop", "/v1/completions",
    "/completion", "/completions", "/infill", "/tokenize", "/detokenize", "/apply-template",
    "/embedding", "/embeddings", "/v1/embeddings", "/v2/embed",
    "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v2/rerank", "/score", "/v1/score",
    "/classify", "/v1/classify",
    "/audio/transcriptions", "/audio/translations", "/v1/audio/transcriptions",
    "/audio/speech", "/audio/voices", "/v1/audio/speech", "/v1/audio/voices",
    "/v1/audio/translations", "/v1/messages", "/v1/messages/count_tokens",
    "/responses", "/responses/compact", "/responses/input_tokens", "/responses/<response:id_>",
    "/responses/<response:id_>/cancel", "/responses/<response:id_>/input_items",
    "/chat/completions/compact", "/v1/chat/completions/compact",
    "/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens",
    "/v1/responses/<response:id_>",
    "/v1/responses/<response:id_>/cancel", "/v1/responses/<response:id_>/input_items",
    "/v1/responses/<id_>/approve", "/v1/responses/<id_>/stop",
    "/v1/conversations", "/v1/conversations/<id_>", "/v1/conversations/<id_>/items",
    "/v1/conversations/<id_>/items/<item>",
    "/v1/usage", "/v1/files", "/v1/files/<id_>", "/v1/files/<id_>/content",
    "/v1/batches", "/v1/batches/<id_>", "/v1/batches/<id_>/cancel",
    "/v1/messages/batches", "/v1/messages/batches/<id_>", "/v1/messages/batches/<id_>/cancel",
    "/v1/messages/batches/<id_>/results", "/v1/chat/completions/<id_>",
    "/v1/chat/completions/<id_>/messages",
    "/v1/stream", "/v1/stream/<id_>", "/v1/streams/lookup",
}  # fmt: skip

#: Routes for keys that may manage the server.
MANAGEMENT = {
    "POST /slots/<id_slot>", "POST /lora-adapters", "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter", "POST /props", "POST /models", "DELETE /models",
    "GET /models/hub", "POST /models/estimate",
    "POST /models/load", "POST /models/unload", "POST /api/pull", "DELETE /api/delete",
}  # fmt: skip


def apps() -> tuple[App, App]:
    return create_app(Config()), create_router(Config(), cast(Any, None))


def routes(app: App) -> dict[str, Route]:
    return {f"{route.method} {route.path}": route for route in app.state.routes}


def managing(app: App) -> list[str]:
    """The routes whose handlers are marked with `manages`."""
    return sorted(name for name, route in routes(app).items() if route.manages)


@pytest.mark.parametrize("app", apps(), ids=["server", "router"])
def test_each_route_is_for_all_keys_or_for_management(app: App) -> None:
    """A new route belongs into CLIENTS here, or its handler is marked with `manages`."""
    marked = set(managing(app))
    for name, route in routes(app).items():
        is_for_all = name in CLIENTS or route.path in CLIENTS
        assert (name in marked) != is_for_all, name
    assert marked <= MANAGEMENT


def test_every_entry_of_the_lists_is_a_route() -> None:
    known = {name for app in apps() for name in routes(app)}
    assert known >= MANAGEMENT
    assert {route.rpartition(" ")[2] for route in known} >= {c.rpartition(" ")[2] for c in CLIENTS}


@pytest.mark.parametrize("route", managing(create_app(Config())))
async def test_management_needs_the_permission(route: str, path: Path) -> None:
    method, rule = route.split()
    url = rule.replace("<id_slot>", "0")
    async with client_of(keys_file=str(path), api_keys=("own",)) as client:
        refused = await client.request(method, url, json={}, headers=bearer("c"))
        assert refused.status_code == 403, refused.text
        assert "may not manage the server" in refused.text and "'chat'" in refused.text
        for key in ("a", "own"):
            answer = await client.request(method, url, json={}, headers=bearer(key))
            assert answer.status_code not in (401, 403), answer.text


async def test_unloading_by_ollama_is_management(path: Path) -> None:
    async with client_of(keys_file=str(path)) as client:
        for body in ({"keep_alive": 0}, {"keep_alive": 0, "prompt": ""}):
            answer = await client.post("/api/generate", json=body, headers=bearer("c"))
            assert answer.status_code == 403
        answer = await client.post("/api/generate", json={"keep_alive": 0}, headers=bearer("a"))
        assert answer.status_code == 200


async def test_only_a_key_that_may_manage_puts_a_model_to_sleep(path: Path) -> None:
    async def use(client: httpx.AsyncClient, key: str, keep_alive: float) -> str:
        for url, body in (
            ("/api/chat", CHAT | {"stream": False}),
            ("/api/chat", {}),
            ("/v1/chat/completions", CHAT),
            ("/completion", {"prompt": "a", "n_predict": 1}),
        ):
            body = {"model": "one", "keep_alive": keep_alive} | body
            answer = await client.post(url, json=body, headers=bearer(key))
            refused = (
                key == "c" and url == "/api/chat" and "messages" not in body and not keep_alive
            )
            assert answer.status_code == (403 if refused else 200), (url, answer.text)
        (model,) = (await client.get("/api/ps", headers=bearer(key))).json()["models"]
        return str(model["expires_at"])

    never = "2318-01-01T00:00:00Z"
    settings: dict[str, Any] = {"keys_file": str(path)}
    async with client_of(**settings) as one, routed(child=settings, **settings) as router:
        for client in (one, router.client):
            for keep_alive in (0, 1e-9, 3600):
                assert await use(client, "c", keep_alive) == never
            soon = await use(client, "a", 3600)
            assert soon < never and await use(client, "c", 60) >= soon
            assert soon < await use(client, "c", 7200) < await use(client, "c", -1) == never
    async with routed({"one": None}, **settings) as router:
        for key, status in (("c", 403), ("a", 200)):
            body = {"model": "one", "keep_alive": 0}
            answer = await router.client.post("/api/generate", json=body, headers=bearer(key))
            assert answer.status_code == status


# -- models


async def test_a_model_that_a_key_may_not_use(path: Path) -> None:
    async with client_of(keys_file=str(path), alias="this-one") as client:
        assert (await ask(client, "c")).status_code == 200
        refused = await ask(client, "o")
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
        for url, body in (
            ("/v1/messages", CHAT),
            ("/completion", {"prompt": "a", "n_predict": 1}),
            ("/tokenize", {"content": "a"}),
            ("/api/chat", CHAT),
            ("/api/show", {"model": "this-one"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/responses", {"input": "a"}),
        ):
            answer = await client.post(url, json=body, headers=bearer("o"))
            assert answer.status_code == 403, (url, answer.text)
        for key, n in (("c", 1), ("o", 0)):
            models = (await client.get("/v1/models", headers=bearer(key))).json()
            assert (len(models["data"]), len(models["models"])) == (n, n)
            for url in ("/api/tags", "/api/ps"):
                listed = (await client.get(url, headers=bearer(key))).json()["models"]
                assert len(listed) == n
            for url in ("/v1/models/this-one", "/props"):
                answer = await client.get(url, headers=bearer(key))
                assert answer.status_code == (200 if n else 403)
    async with client_of(keys_file=str(path), alias="x,another-name") as client:
        assert (await ask(client, "o")).status_code == 200


async def test_a_router_lists_and_loads_only_the_models_of_a_key(path: Path) -> None:
    path.write_text(
        table("one", "1", 'models = ["one"]')
        + table("operator", "2", "manage = true", 'models = ["two"]')
    )
    settings = {"keys_file": str(path)}
    backends = {"one": ScriptedBackend(), "two": ScriptedBackend()}
    async with routed(backends, child=settings, **settings) as router:
        client = router.client
        for key, own, other in (("1", "one", "two"), ("2", "two", "one")):
            for url in ("/v1/models", "/models"):
                listed = (await client.get(url, headers=bearer(key))).json()["data"]
                assert [model["id"] for model in listed] == [own]
            listed = (await client.get("/api/tags", headers=bearer(key))).json()["models"]
            assert [model["name"] for model in listed] == [own]
            assert (await ask(client, key, model=own)).status_code == 200
            refused = await ask(client, key, model=other)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == 403
            unknown = await ask(client, key, model="three")
            assert unknown.status_code == 404 and other not in unknown.text
            assert (await client.get(f"/models/{other}", headers=bearer(key))).status_code == 403
        for method, url in (
            ("GET", "/models?reload=1"),
            ("POST", "/models/load"),
            ("POST", "/models/unload"),
            ("DELETE", "/models?model=two"),
        ):
            body = None if method == "GET" else {"model": "two"}
            answer = await client.request(method, url, json=body, headers=bearer("1"))
            assert answer.status_code == 403 and "may not manage" in answer.text
        wanted = {"model": "two"}
        answer = await client.post("/models/unload", json=wanted, headers=bearer("2"))
        assert answer.status_code == 200 and ("unload", "two") in router.fleet.calls
        wanted = {"model": "one"}
        answer = await client.post("/models/unload", json=wanted, headers=bearer("2"))
        assert answer.status_code == 403


async def test_a_key_downloads_only_its_models(path: Path) -> None:
    path.write_text(table("operator", "2", "manage = true", 'models = ["my/*"]'))
    async with routed({}, keys_file=str(path)) as router:
        other = "user/repo:Q8_0"
        running = Download(HubReference.parse(other))
        router.service.downloads.running[other] = running  # type: ignore[index]
        for url in ("/models", "/models/unload", "/api/pull"):
            answer = await router.client.post(url, json={"model": other}, headers=bearer("2"))
            assert answer.status_code in (403, 404) and "may" in answer.text, url
        assert not running.scope.cancel_called


async def test_a_key_hears_only_of_its_models(path: Path) -> None:
    path.write_text(table("one", "1", 'models = ["one"]'))
    async with (
        routed({"one": None, "two": None}, keys_file=str(path)) as router,
        router.client.stream("GET", "/models/sse", headers=bearer("1")) as answer,
    ):
        feed = router.fleet.events.subscribers[0]
        for name in ("two", "one"):
            feed.put(FleetEvent(model=name, event="model_status"))
        feed.end()
        text = (await answer.aread()).decode()
    assert '"one"' in text and '"two"' not in text


# -- limits


async def test_a_key_has_limits_of_its_own(path: Path) -> None:
    async with client_of(keys_file=str(path), rate_limit_requests=100) as client:
        answer = await ask(client, "s")
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-limit-tokens"] == "500"
        assert (await ask(client, "s")).status_code == 429
        answer = await ask(client, "c")
        assert answer.headers["x-ratelimit-limit-requests"] == "100"
        assert "x-ratelimit-limit-tokens" not in answer.headers
        # A limit that changes holds at once, and what was used stays used.
        replace(path, table("slow", "s", "requests-per-minute = 0"))
        assert (await ask(client, "new")).status_code == 401  # which has the file read
        answer = await ask(client, "s")
        assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers


async def test_a_key_has_a_priority(path: Path) -> None:
    path.write_text(table("high", "h", "priority = 7") + table("low", "l"))
    async with client_of(keys_file=str(path)) as client:
        assert (await ask(client, "h", priority=7)).status_code == 200
        for key, priority in (("h", 8), ("l", 1)):
            answer = await ask(client, key, priority=priority)
            assert answer.status_code == 400 and "'priority'" in answer.text


# -- the file


async def test_keys_are_added_and_removed_while_the_server_runs(path: Path) -> None:
    async with client_and_service(keys_file=str(path)) as (client, service):
        assert (await ask(client, "new")).status_code == 401
        replace(path, table("new", "new"))
        assert (await ask(client, "new")).status_code == 200
        assert (await ask(client, "c")).status_code == 401
        replace(path, "[new")
        service.keys.refresh()
        assert (await ask(client, "new")).status_code == 200


async def test_an_empty_file_lets_no_one_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# nothing yet\n")
    async with client_of(keys_file=str(path)) as client:
        assert (await client.get("/props")).status_code == 401
        assert (await client.get("/health")).status_code == 200
