"""Routes of a router: lists and descriptions of models, loading, unloading, deleting."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anthropic
import attrs
import openai
import pytest
import trio

from tests.support.fake_fleet import entry, routed
from tests.support.http_server import chunks_of
from tests.support.media_models import write_projector
from tests.support.waiting import patiently
from trioserve.api.router import files
from trioserve.models import BUNDLED
from trioserve.models.catalog import Source
from trioserve.router.states import FleetEvent, ModelState, Status
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.types import Modalities

TWO = {"one": None, "two": None}


async def test_the_list_of_models() -> None:
    async with routed({"one": ScriptedBackend(), "two": None}) as router:
        listed = (await router.client.get("/models")).json()
        assert (await router.client.get("/v1/models")).json() == listed
    assert listed["object"] == "list"
    assert listed["has_more"] is False
    assert (listed["first_id"], listed["last_id"]) == ("one", "two")
    one, two = listed["data"]
    assert one["id"] == "one"
    assert one["status"] == {"value": "loaded", "args": ["--model", "/one"]}
    assert one["source"] == "models_dir"
    assert one["can_remove"] is False
    assert two["status"]["value"] == "unloaded"


async def test_a_running_model_is_described() -> None:
    async with routed({"one": ScriptedBackend(), "two": None}, child={"alias": "other"}) as router:
        router.fleet.states["one"] = ModelState(
            value=Status.LOADED,
            args=("--model", "/one", "--host", "x.sock"),
            pid=123,
            last_used=5.0,
            memory=9,
            memory_used=8,
            memory_gpus=(7,),
        )
        router.fleet.states["two"] = ModelState(
            failed=True, exit_code=1, message="It died.", log_tail=("a", "b")
        )
        one, two = (await router.client.get("/models")).json()["data"]
        router.processes["one"].die()
        await router.fleet.children["one"].ended.wait()
        after, _ = (await router.client.get("/models")).json()["data"]
    assert one["meta"]["n_ctx"] > 0 and one["meta"] == after["meta"]
    assert one["id"] == "one"
    assert one["status"] == {
        "value": "loaded",
        "args": ["--model", "/one", "--host", "x.sock"],
        "pid": 123,
        "memory": 9,
        "memory_used": 8,
        "memory_gpus": [7],
        "last_used": 5.0,
    }
    assert two["status"] == {
        "value": "unloaded",
        "args": ["--model", "/two"],
        "failed": True,
        "exit_code": 1,
        "message": "It died.",
        "log": ["a", "b"],
    }


async def test_modalities_are_known_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    projectors = {kind: write_projector(tmp_path / kind, kind) for kind in ("mlp", "mixed")}
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF?")
    flags: dict[str, list[str]] = {
        "sees": ["--mmproj", str(projectors["mlp"])],
        "embeds": ["--mmproj", str(projectors["mixed"]), "--embeddings"],
        "reads": ["--no-mmproj"],
        "broken": ["--mmproj", str(broken)],
    }
    expected = {
        "sees": ["text", "image"],
        "embeds": ["text", "image", "audio"],
        "reads": ["text"],
        "broken": ["text"],
        "loaded": ["text", "image", "audio"],
    }
    hears = ScriptedBackend(projector=ScriptedProjector())
    async with routed({**dict.fromkeys(flags), "loaded": hears}) as router:
        router.fleet.catalog.entries = {
            name: entry(name, args=("--model", f"/{name}", *more))
            for name, more in {**flags, "loaded": []}.items()
        }
        for _ in range(2):
            listed = (await router.client.get("/v1/models")).json()["data"]
            found = {one["id"]: one["architecture"]["input_modalities"] for one in listed}
            assert found == expected
            monkeypatch.setattr(files, "modalities_in", None)  # no file is read again
        one = (await router.client.get("/v1/models/sees")).json()
        assert one["architecture"]["input_modalities"] == expected["sees"]


async def test_it_is_known_before_loading_what_speaks() -> None:
    flags: dict[str, tuple[str, ...]] = {
        "speaks": ("--tts", "v.gguf"), "writes": (), "mute": ("--tts", "none"),
    }  # fmt: skip
    async with routed(dict.fromkeys(flags)) as router:
        router.fleet.catalog.entries = {
            name: entry(name, args=("--model", f"/{name}", *more)) for name, more in flags.items()
        }
        listed = (await router.client.get("/v1/models")).json()["data"]
    found = {one["id"]: one["architecture"]["output_modalities"] for one in listed}
    assert found == {"speaks": ["text", "audio"], "writes": ["text"], "mute": ["text"]}


async def test_a_head_without_its_stream_ends_at_once() -> None:
    async with routed(TWO) as router:
        with patiently():
            head = await router.client.head("/models/sse")
            assert head.headers["content-type"] == "text/event-stream"
            await router.client.get("/health")  # on the same connection
        assert not router.fleet.events.subscribers


async def test_one_model() -> None:
    async with routed(TWO) as router:
        for path in ("/models/one", "/v1/models/one", "/v1/models/ONE"):
            assert (await router.client.get(path)).json()["id"] == "one"
        missing = await router.client.get("/v1/models/a/b")
        assert missing.status_code == 404
        # Those that are hidden are not listed:
        entries = router.fleet.catalog.entries
        hidden = attrs.evolve(entries["two"], hidden=True)
        router.fleet.catalog.entries = {**entries, "two": hidden}
        listed = (await router.client.get("/models")).json()["data"]
        assert [one["id"] for one in listed] == ["one"]
        await router.client.get("/models?reload=1")
        assert router.fleet.calls == [("reload", "*")]


async def test_openai_and_anthropic_read_the_list() -> None:
    def ask(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            assert [one.id for one in client.models.list()] == ["one", "two"]
            assert client.models.retrieve("one").owned_by == "trioserve"
        with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as other:
            assert [one.display_name for one in other.models.list()] == ["one", "two"]
            assert other.models.retrieve("two").created_at.year == 2001

    async with routed(TWO) as router:
        router.fleet.catalog.entries = {
            name: attrs.evolve(one, version=(10**18, 5))
            for name, one in router.fleet.catalog.entries.items()
        }
        await trio.to_thread.run_sync(ask, router.url)


async def test_loading_and_unloading() -> None:
    async with routed({"one": ScriptedBackend(), "two": None}) as router:
        client = router.client
        loaded = await client.post("/models/load", json={"model": "two"})
        assert (loaded.status_code, loaded.json()) == (200, {"success": True})
        unloaded = await client.post("/models/unload", json={"model": "one"})
        assert (unloaded.status_code, unloaded.json()) == (200, {"success": True})
        assert router.fleet.calls == [("load", "two"), ("unload", "one")]
        assert (await client.post("/models/load", json={"model": "one"})).status_code == 400
        assert (await client.post("/models/unload", json={"model": "two"})).status_code == 400


async def test_models_that_cannot_be_loaded() -> None:
    async with routed(TWO) as router:
        for path, body, status in (
            ("/models/load", {"model": "none"}, 404),
            ("/models/load", {}, 400),
            ("/models/load", {"model": 5}, 400),
            ("/models/unload", {"model": "none"}, 404),
            ("/models/unload", {"model": ""}, 400),
        ):
            answer = await router.client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, "model")


async def test_deleting_and_unloading_need_whole_names() -> None:
    async with routed({"one-Q8": ScriptedBackend(), "two": ScriptedBackend()}) as router:
        entries = router.fleet.catalog.entries
        router.fleet.catalog.entries = {
            name: attrs.evolve(one, source=Source.CACHE) for name, one in entries.items()
        }
        for name in ("one", "ONE-Q8", "", "q8"):
            answer = await router.client.delete("/models", params={"model": name})
            assert answer.status_code == 404
            answer = await router.client.post("/models/unload", json={"model": name})
            assert answer.status_code == (404 if name else 400)
            body = {"model": name, "keep_alive": 0}
            assert (await router.client.post("/api/generate", json=body)).status_code == 404
        assert router.fleet.calls == [] and router.fleet.users == []
        answer = await router.client.post("/models/unload", json={"model": "one-Q8"})
        assert answer.status_code == 200
        assert router.fleet.calls == [("unload", "one-Q8")]


async def test_a_path_that_is_no_unicode() -> None:
    async with routed(TWO) as router:
        path = Path(os.fsdecode(b"/bad\xff.gguf"))
        args = ("--model", str(path))
        router.fleet.catalog.entries = {"one": entry("one", path=path, args=args)}
        for route in ("/models", "/models/one", "/api/tags"):
            answer = await router.client.get(route)
            assert answer.status_code == 200
        assert (await router.client.get("/models/one")).json()["path"] == "/bad?.gguf"


async def test_events() -> None:
    request = b"GET /models/sse HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with routed(TWO) as router, chunks_of(router.url, request) as next_chunk:
        assert await next_chunk() == ":\n\n"
        (feed,) = router.fleet.events.subscribers
        feed.put(FleetEvent(model="one", event="status_change", data={"status": "loading"}))
        assert json.loads((await next_chunk()).removeprefix("data: ")) == {
            "model": "one",
            "event": "status_change",
            "data": {"status": "loading"},
        }
        feed.put(FleetEvent(model="*", event="models_reload"))
        assert json.loads((await next_chunk()).removeprefix("data: ")) == {
            "model": "*",
            "event": "models_reload",
        }


async def test_properties_of_the_router() -> None:
    async with routed(TWO, models_max=2, models_autoload=False) as router:
        props = (await router.client.get("/props")).json()
        assert props["role"] == "router"
        assert props["max_instances"] == 2
        assert props["models_autoload"] is False
        assert props["build_info"].startswith("b")


async def test_health() -> None:
    async with routed(TWO) as router:
        for path in ("/health", "/v1/health", "/health/ready", "/health/live"):
            assert (await router.client.get(path)).json() == {"status": "ok"}
        await router.service.drain()
        assert (await router.client.get("/health")).status_code == 503


def test_the_bundled_model_is_a_toy_before_it_is_loaded() -> None:
    toy = files.described(entry("bundled", path=BUNDLED), ModelState(), Modalities(), {})
    assert (toy["is_toy"], len(toy["example_prompts"])) == (True, 3)
    other = files.described(entry("one"), ModelState(), Modalities(), {})
    assert (other["is_toy"], other["example_prompts"]) == (False, [])
