"""LoRA adapters by name, and those that are loaded and unloaded while requests run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
import trio

from tests.support.clients import client_and_service, client_of, client_of_app, use_openai
from tests.support.lora_files import make_lora
from tests.support.scripts import ENDLESS, HI
from tests.support.sleepers import wake
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ModelLoadError, UnknownModelError
from trioserve.models.catalog.catalog import ModelEntry, Source, find_named
from trioserve.server import Server
from trioserve.server.adapters import AdapterNames, names_of
from trioserve.testing import ScriptedBackend
from trioserve.types import AdapterInfo

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PIRATE = {"lora_name": "pirate", "lora_path": "pirate.gguf"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "lora"
    inside.mkdir()
    (inside / "pirate.gguf").touch()
    return inside


async def text_of(client: httpx.AsyncClient, model: str | None) -> tuple[str, str]:
    """Continue a prompt; returns the model in the answer, and the text."""
    body: dict[str, Any] = {"prompt": "abc", **({} if model is None else {"model": model})}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["model"], answer.json()["choices"][0]["text"]


# -- names


def test_adapters_have_the_names_of_their_files() -> None:
    assert names_of(["/x/a.gguf", "b.bin", "/y/a.gguf", "a-2.gguf"]) == ["a", "b", "a-2", "a-2-2"]


def named(**config: Any) -> AdapterNames:
    server = Server(Config(**config))
    server.lifecycle._model = mock.Mock(names=("m:Q4", "alias"))
    return server.adapters


def test_what_a_name_means(tmp_path: Path) -> None:
    names = named(lora=("x/pirate.gguf:0.5",))
    for model in ("pirate", "m:Q4:pirate", "alias:pirate", "pirate:latest"):
        assert names.named(model) == "pirate"
    for model in (None, "", "m:Q4", "alias", "alias:latest", "gpt-5", "gpt:pirate"):
        assert names.named(model) is None
    with pytest.raises(UnknownModelError, match="there are m:Q4, pirate") as caught:
        names.named("alias:parrot")
    assert caught.value.param == "model"
    strict = named(lora_dir=str(tmp_path))
    with pytest.raises(UnknownModelError):
        strict.named("gpt-5")
    assert named().named("alias:parrot") is None


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "abc"}),
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/chat/completions", {"messages": HI, "stream": True}),
    ("/v1/responses", {"input": "abc"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 50}),
    ("/api/chat", {"messages": HI, "stream": False}),
    ("/api/generate", {"prompt": "abc", "stream": False}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_every_route_that_generates_takes_the_name(path: str, body: dict[str, Any]) -> None:
    infos = (AdapterInfo(path="x/pirate.gguf"), AdapterInfo(path="x/parrot.gguf", scale=0.5))
    backend = ScriptedBackend(lambda prompt: "said", adapters=infos, n_ctx=4096)
    lora = ("x/pirate.gguf", "x/parrot.gguf:0.5")
    async with client_of(backend, lora=lora) as client:
        for model in ("parrot", "scripted:parrot"):
            answer = await client.post(path, json={**body, "model": model})
            assert answer.status_code == 200, answer.text
            assert "<1:0.5>said" in answer.text or body.get("stream")  # in pieces
            assert '"parrot"' in answer.text
        answer = await client.post(path, json={**body, "model": "scripted"})
        assert '"scripted"' in answer.text
        for fields, param in (
            ({"model": "scripted:other"}, "model"),
            ({"model": "parrot", "lora": [{"id": 0, "scale": 1}]}, "lora"),
        ):
            answer = await client.post(path, json={**body, **fields})
            assert answer.status_code in (400, 404), answer.text
            assert f"'{param}'" in answer.text


async def test_openai_s_sdk_lists_and_uses_an_adapter() -> None:
    def use(client: openai.OpenAI) -> None:
        listed = client.models.list().data
        assert [model.id for model in listed] == ["scripted", "pirate"]
        assert client.models.retrieve("pirate").to_dict()["parent"] == "scripted"
        answer = client.completions.create(model="scripted:pirate", prompt="abc")
        assert (answer.model, answer.choices[0].text) == ("pirate", "<0:1>ABC")

    backend = ScriptedBackend(adapters=(AdapterInfo(path="x/pirate.gguf"),))
    await use_openai(backend, use, lora=("x/pirate.gguf",))


def test_a_router_finds_the_model_of_an_adapter() -> None:
    def entry(name: str, *args: str) -> ModelEntry:
        return ModelEntry(name=name, source=Source.PRESET, args=args, path=None)

    entries = {"a": entry("a", "--lora-dir", "x"), "b": entry("b", "--lora=y"), "c": entry("c")}
    assert find_named(entries, "a:pirate", ()).name == "a"
    assert find_named(entries, "b:pirate", ()).name == "b"
    with pytest.raises(UnknownModelError):
        find_named(entries, "c:pirate", ())


# -- loading and unloading


async def test_an_adapter_comes_and_goes(folder: Path) -> None:
    async with client_of(lora_dir=str(folder)) as client:
        assert await text_of(client, "scripted") == ("scripted", "ABC")
        answer = await client.post(LOAD, json=PIRATE)
        assert answer.status_code == 200, answer.text
        assert answer.text == "Success: LoRA adapter 'pirate' added successfully."
        assert await text_of(client, "pirate") == ("pirate", "<0:1>ABC")
        assert await text_of(client, None) == ("scripted", "ABC")
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["scripted", "pirate"]
        assert listed[1]["parent"] == "scripted"
        assert listed[1]["root"] == str((folder / "pirate.gguf").resolve())
        answer = await client.post(UNLOAD, json={"lora_name": "pirate"})
        assert answer.status_code == 200, answer.text
        refused = await client.post("/v1/completions", json={"prompt": "abc", "model": "pirate"})
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        assert (await client.get("/lora-adapters")).json() == []
        gone = {"prompt": "abc", "lora": [{"id": 0, "scale": 1}]}
        assert "it was unloaded" in (await client.post("/completion", json=gone)).text
        assert (await client.post(LOAD, json=PIRATE)).status_code == 200
        # Prompts cached with the first one are not found: it has another id.
        assert await text_of(client, "pirate") == ("pirate", "<1:1>ABC")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_name": "scripted"}, "lora_name"),
        ({"lora_name": "a:b"}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": 5}, "lora_name"),
        ({"lora_path": "none.gguf"}, "lora_path"),
        ({"lora_path": "../outside.gguf"}, "lora_path"),
        ({"lora_path": "/etc/passwd"}, "lora_path"),
        ({"lora_path": "link.gguf"}, "lora_path"),
        ({"lora_path": "loop.gguf"}, "lora_path"),
        ({"lora_path": "below/../../outside.gguf"}, "lora_path"),
        ({"lora_path": "a\0b"}, "lora_path"),
        ({"lora_path": "x" * 3000}, "lora_path"),
        ({"lora_path": "."}, "lora_path"),
        ({"load_inplace": True}, "load_inplace"),
    ],
)
async def test_what_cannot_be_loaded(folder: Path, fields: dict[str, Any], param: str) -> None:
    (folder.parent / "outside.gguf").touch()
    (folder / "below").mkdir()
    (folder / "link.gguf").symlink_to(folder.parent / "outside.gguf")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    async with client_of(lora_dir=str(folder)) as client:
        answer = await client.post(LOAD, json={**PIRATE, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


async def test_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / "link.gguf").symlink_to(folder / "pirate.gguf")
    async with client_of(lora_dir=str(folder)) as client:
        assert (await client.post(LOAD, json={**PIRATE, "lora_path": "link.gguf"})).is_success
        answer = await client.post(LOAD, json=PIRATE)
        assert answer.json()["error"]["param"] == "lora_name"  # it is taken


async def test_without_the_flag_both_routes_are_refused() -> None:
    async with client_of() as client:
        for path in (LOAD, UNLOAD):
            answer = await client.post(path, json=PIRATE)
            assert answer.status_code == 501 and "--lora-dir" in answer.text


async def test_a_damaged_file_is_a_400(folder: Path) -> None:
    def refuse(path: Path) -> None:
        raise ModelLoadError(f"The LoRA adapter {path} cannot be used: it is damaged.")

    backend = ScriptedBackend()
    backend.on_adapter = refuse
    async with client_of(backend, lora_dir=str(folder)) as client:
        answer = await client.post(LOAD, json=PIRATE)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "lora_path"
        assert len((await client.get("/v1/models")).json()["data"]) == 1


async def test_one_in_use_is_not_unloaded(folder: Path) -> None:
    backend = ScriptedBackend(
        lambda prompt: "x" * ENDLESS if "endless" in prompt else prompt.upper(), n_ctx=2 * ENDLESS
    )
    async with client_and_service(backend, lora_dir=str(folder)) as (client, service):
        assert (await client.post(LOAD, json=PIRATE)).is_success
        server = service.server
        params = await server.params({"lora": ((0, 1.0),)})
        async with server.stream_all(["endless"], params):
            answer = await client.post(UNLOAD, json={"lora_name": "pirate"})
        assert answer.status_code == 409, answer.text
        assert answer.json()["error"]["code"] == "adapter_in_use"
        assert (await text_of(client, "pirate"))[1] == "<0:1>ABC"
        assert (await client.post(UNLOAD, json={"lora_name": "pirate"})).is_success
        unknown = await client.post(UNLOAD, json={"lora_name": "pirate"})
        assert unknown.json()["error"]["param"] == "lora_name"


async def test_what_came_with_the_model_stays(folder: Path) -> None:
    backend = ScriptedBackend(adapters=(AdapterInfo(path="x/own.gguf"),))
    async with client_of(backend, lora=("x/own.gguf",), lora_dir=str(folder)) as client:
        answer = await client.post(UNLOAD, json={"lora_name": "own"})
        assert answer.status_code == 400 and "--lora" in answer.text


async def test_an_adapter_is_loaded_again_when_the_model_wakes(folder: Path) -> None:
    def try_adapter(path: Path) -> None:
        if not path.exists():
            raise ModelLoadError("It is gone.")

    def load(config: Config, *, progress: Any = None) -> ScriptedBackend:
        backend = ScriptedBackend()
        backend.on_adapter = try_adapter
        return backend

    (folder / "parrot.gguf").touch()
    async with Server(Config(lora_dir=str(folder)), load=load) as server:
        await server.load_adapter("pirate", "pirate.gguf")
        await server.load_adapter("parrot", "parrot.gguf")
        server.adapters.scales.set({1: 0.5})
        await server.unload_adapter("pirate")
        await server.load_adapter("pirate", "pirate.gguf")
        await server.sleep()
        assert list(server.adapters.paths) == ["parrot", "pirate"]
        assert server.adapters.named("pirate") == "pirate"
        await wake(server)
        assert server.adapters.scales.by_name == {"parrot": 0.5, "pirate": 0.0}
        await server.sleep()
        (folder / "parrot.gguf").unlink()
        await wake(server)
        assert list(server.adapters.paths) == ["pirate"]


# -- with llama.cpp


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    make_lora(directory / "a.gguf", seed=1)
    make_lora(directory / "other.gguf", arch="gemma")
    damaged = (directory / "a.gguf").read_bytes()
    (directory / "short.gguf").write_bytes(damaged[: len(damaged) // 2])
    (directory / "empty.gguf").touch()
    shutil.copy(directory / "a.gguf", directory / "b.gguf")
    return directory


@pytest.mark.system
async def test_loading_beside_streams(files: Path) -> None:
    """Streams run on with the same text, and the adapter gives what it gives from the start."""
    settings: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60}
    given = Config(ctx_size=2048, threads=1, lora=(str(files / "a.gguf"),))
    async with client_of_app(create_app(given)) as client:
        body = {**settings, "model": "a", "cache_prompt": False}
        expected = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    config = Config(ctx_size=2048, threads=1, parallel=3, lora_dir=str(files))
    async with client_of_app(create_app(config)) as client:
        plain = (await client.post("/v1/completions", json=settings)).json()["choices"][0]["text"]
        assert plain != expected
        texts: list[str] = []

        async def stream() -> None:
            answer = await client.post("/v1/completions", json={**settings, "cache_prompt": False})
            texts.append(answer.json()["choices"][0]["text"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream)
            nursery.start_soon(stream)
            answer = await client.post(LOAD, json={"lora_name": "x", "lora_path": "a.gguf"})
            assert answer.status_code == 200, answer.text
        body = {**settings, "model": "x", "cache_prompt": False}
        text = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        assert (text, texts) == (expected, [plain, plain])
        assert (await client.post(UNLOAD, json={"lora_name": "x"})).is_success
        again = (await client.post("/v1/completions", json=settings)).json()["choices"][0]["text"]
        assert again == plain
        for name in ("other", "short", "empty"):
            answer = await client.post(LOAD, json={"lora_name": name, "lora_path": f"{name}.gguf"})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "lora_path"
        assert (await client.get("/health")).is_success


def test_an_engine_refuses_a_task_with_an_adapter_that_is_being_unloaded() -> None:
    from trioserve.engine import DecodeMaximal, Engine
    from trioserve.types import CacheRoot, Prompt, Task

    engine = Engine(ScriptedBackend(), DecodeMaximal(), lambda: None)
    assert engine.adapter_table.add(Path("a.gguf")) == 0
    task = Task(1, Prompt((65,)), root=CacheRoot(((0, 1.0),)))
    engine.check(task)
    engine.submit(task)
    engine.step()
    assert engine.adapter_table.remove(0) is False
    engine.cancel(1)
    engine.step()
    engine.adapter_table.closed |= {0}
    with pytest.raises(InvalidRequestError, match="no LoRA adapter 0"):
        engine.check(Task(2, Prompt((65,)), root=CacheRoot(((0, 1.0),))))
    assert engine.adapter_table.remove(0) is True
