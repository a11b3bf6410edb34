"""Tools of the MCP server, called by the client of the official SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import mcp_types
import pytest
import trio
from mcp import Client

from tests.server.test_keys import table
from tests.support.canned_server import serving_bytes
from tests.support.fake_fleet import FakeCatalog, FakeFleet, entry
from tests.support.http_server import serving, serving_at, serving_script, slots_in_use
from tests.support.model_processes import child_of
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripts import answering, endless, noting
from tests.support.waiting import patiently
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.errors import PermissionDeniedError, UnknownModelError
from trioserve.fair_limiter import working_for
from trioserve.mcp_server.models import models_of_fleet, models_of_server
from trioserve.mcp_server.serving import mcp_server
from trioserve.router.fleet import Fleet
from trioserve.router.states import QueueStatus, Status
from trioserve.server.keys import Keys
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import Grammar

#: Loads a model of a fleet.
Loads: TypeAlias = Callable[..., Awaitable[None]]


@asynccontextmanager
async def client_of(url: str, mode: str = "auto", **options: Any) -> AsyncIterator[Client]:
    async with (
        models_of_server(url, **options) as models,
        Client(mcp_server(models), mode=mode) as client,
    ):
        yield client


def text_of(result: mcp_types.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, mcp_types.TextContent)
    return content.text


async def answer(client: Client, name: str, **arguments: object) -> dict[str, Any]:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result
    assert result.structured_content is not None
    return result.structured_content


async def refusal(client: Client, name: str, **arguments: object) -> str:
    result = await client.call_tool(name, arguments)
    assert result.is_error, result
    return text_of(result)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_chat(mode: str) -> None:
    async with serving_script(answering("Hello!")) as (url, _), client_of(url, mode) as client:
        result = await client.call_tool("chat", {"prompt": "Hi"})
    assert text_of(result) == "Hello!"
    content = result.structured_content
    assert content is not None
    assert content.pop("prompt_tokens") > 2
    assert content == {
        "text": "Hello!",
        "model": "scripted",
        "finish_reason": "stop",
        "completion_tokens": 7,
        "reasoning": "",
    }


async def test_what_the_model_sees_of_a_chat() -> None:
    backend, prompts = noting("Yes")
    async with serving_script(backend) as (url, _), client_of(url) as client:
        history = [
            {"role": "user", "content": "First"},
            {"role": "assistant", "content": "Second"},
        ]
        await answer(client, "chat", prompt="Third", system="Be brief.", history=history)
    (prompt,) = prompts
    places = [prompt.index(text) for text in ("Be brief.", "First", "Second", "Third")]
    assert places == sorted(places)


async def test_an_answer_that_follows_a_schema() -> None:
    backend, grammars = answering('{"size": 1}'), list[Grammar]()
    backend.on_compile = grammars.append
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}}
    async with serving_script(backend) as (url, _), client_of(url) as client:
        made = await answer(client, "chat", prompt="Hi", json_schema=schema)
    assert made["text"] == '{"size": 1}'
    assert "size" in str(grammars)


async def test_an_answer_that_is_too_long_says_so() -> None:
    async with serving_script(answering("Hello!")) as (url, _), client_of(url) as client:
        result = await client.call_tool("chat", {"prompt": "Hi", "max_tokens": 3})
    first, note = result.content
    assert isinstance(first, mcp_types.TextContent)
    assert isinstance(note, mcp_types.TextContent)
    assert (first.text, "limit of its length" in note.text) == ("Hel", True)


@pytest.mark.system
async def test_the_text_is_told_while_it_comes() -> None:
    told: list[tuple[float, str]] = []
    enough = trio.Event()

    async def take(progress: float, _total: float | None, message: str | None) -> None:
        told.append((progress, message or ""))
        if len(told) == 3:
            enough.set()

    async with (
        serving_script(endless()) as (url, _),
        client_of(url) as client,
        trio.open_nursery() as nursery,
    ):
        call = partial(client.call_tool, "chat", {"prompt": "Hi"}, progress_callback=take)
        nursery.start_soon(call)
        with patiently():
            await enough.wait()
        nursery.cancel_scope.cancel()
    seconds = [one for one, _ in told]
    assert seconds == sorted(set(seconds))
    assert all(message and set(message) <= {"x"} for _, message in told)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_call_that_is_cancelled_frees_its_slot(mode: str) -> None:
    async with serving_script(endless()) as (url, service), client_of(url, mode) as client:

        async def until_in_use(n: int) -> None:
            with patiently():
                while await slots_in_use(service) != n:
                    await trio.sleep(0.005)

        async with trio.open_nursery() as nursery:
            for _ in range(2):  # at the same time
                nursery.start_soon(client.call_tool, "chat", {"prompt": "Hi"})
            await until_in_use(2)
            nursery.cancel_scope.cancel()
        await until_in_use(0)
        assert await answer(client, "list_models") == {
            "models": [{"name": "scripted", "state": "loaded"}]
        }


async def test_tokens_there_and_back() -> None:
    async with serving_script() as (url, _), client_of(url) as client:
        made = await answer(client, "tokenize", text="Grüße")
        assert made["count"] == len(made["tokens"]) == 7
        assert await answer(client, "detokenize", tokens=made["tokens"]) == {"text": "Grüße"}


async def test_lists_that_a_client_sends_as_text() -> None:
    backend, prompts = noting("Yes")
    async with serving_script(backend) as (url, _), client_of(url) as client:
        history = [{"role": "user", "content": "[First]"}]
        await answer(client, "chat", prompt="[Second]", history=json.dumps(history))
        assert "texts" in await refusal(client, "embed", texts="[not JSON")
        assert "texts" in await refusal(client, "embed", texts='{"a": 1}')
        assert "texts" in await refusal(client, "embed", texts="[1, 2]")
    assert "[First]" in prompts[0]
    assert "[Second]" in prompts[0]


@asynccontextmanager
async def fleet_of(**backends: ScriptedBackend | None) -> AsyncIterator[tuple[FakeFleet, Loads]]:
    """A fleet of models, those with a backend loaded; and what loads another."""
    fleet = FakeFleet(FakeCatalog({name: entry(name) for name in backends}))
    async with trio.open_nursery() as nursery:

        async def load(name: str, backend: ScriptedBackend, **config: Any) -> None:
            fleet.children[name], _ = await child_of(
                nursery, scripted(backend), Config(**config), name
            )
            fleet.change()

        for name, backend in backends.items():
            if backend is not None:
                await load(name, backend)
        yield fleet, load
        nursery.cancel_scope.cancel()


@pytest.mark.system
async def test_models_of_its_own() -> None:
    told: list[str | None] = []
    async with (
        fleet_of(one=answering("Hello!"), two=None) as (fleet, load),
        models_of_fleet(cast(Fleet, fleet), Keys(Config())) as models,
        Client(mcp_server(models)) as client,
    ):
        fleet.news = [QueueStatus(position=0, status=Status.LOADING, progress=0.5)]

        async def take(_progress: float, _total: float | None, message: str | None) -> None:
            told.append(message)
            if "two" not in fleet.children:
                await load("two", answering("Hello!"))

        assert (await answer(client, "chat", prompt="Hi", model="ONE"))["text"] == "Hello!"
        assert "one, two" in await refusal(client, "chat", prompt="Hi")
        assert "'three'" in await refusal(client, "tokenize", text="Hi", model="three")
        listed = await answer(client, "list_models")
        assert {one["name"]: one["state"] for one in listed["models"]} == {
            "one": "loaded",
            "two": "unloaded",
        }
        result = await client.call_tool(
            "chat", {"prompt": "Hi", "model": "two"}, progress_callback=take
        )
        assert text_of(result) == "Hello!"
    assert told[0] == "Loading two: 50%"
    assert not fleet.users


async def test_processes_get_the_key_of_the_client() -> None:
    keys = ("first", "second")
    of_keys, seen = Keys(Config(api_keys=keys)), list[str]()

    async def cached(client: str) -> int:
        with working_for(client):
            async with models.use(None, seen.append) as (_, server):
                answered = await server.complete("a b c d e f g h " * 20, max_tokens=1)
        return answered.finished.timings.cache_n

    async with (
        fleet_of(one=None) as (fleet, load),
        models_of_fleet(cast(Fleet, fleet), of_keys) as models,
    ):
        await load("one", answering("Hello!"), api_keys=keys)
        held = [await cached(client) for client in ("second", "second", "first", "127.0.0.1")]
    assert held[0] == held[2] == held[3] == 0 and held[1] > 100


async def test_a_key_loads_and_sees_only_what_it_may_use(tmp_path: Path) -> None:
    fleet = FakeFleet(FakeCatalog({name: entry(name) for name in ("one", "two")}))
    file = tmp_path / "keys.toml"
    file.write_text(table("own", "its-own-key", 'models = ["one"]'))
    keys = Keys(Config(keys_file=str(file)))
    keys.load()
    async with models_of_fleet(cast(Fleet, fleet), keys) as models:
        for name, kind in (("two", PermissionDeniedError), ("three", UnknownModelError)):
            with working_for("its-own-key"), pytest.raises(kind) as refused:
                async with models.use(name, print):
                    pass
            assert "one" not in refused.value.message


async def test_embeddings() -> None:
    app = create_app(
        Config(embeddings=True, embd_normalize=-1), load=lambda _, progress=None: ScriptedEmbedder()
    )
    async with serving(app) as url, client_of(url) as client:
        await app.extensions["trioserve"].wait_loaded()
        made = await answer(client, "embed", texts=["a", "bb"])
        assert made["embeddings"] == [[97.0, 0.0, 1.0], [98.0, 0.5, 1.0]]
        assert "no tokens" in await refusal(client, "embed", texts=[""])


async def test_ranking() -> None:
    app = create_app(
        Config(reranking=True), load=lambda _, progress=None: ScriptedEmbedder(pooling="rank")
    )
    async with serving(app) as url, client_of(url) as client:
        await app.extensions["trioserve"].wait_loaded()
        documents = ["a", "c", "b"]
        made = await answer(client, "rerank", query="q", documents=documents)
        assert [one["index"] for one in made["results"]] == [1, 2, 0]
        assert made["results"][0]["score"] == 99.0
        best = await answer(client, "rerank", query="q", documents=documents, top_n=1)
        assert best["results"] == made["results"][:1]


async def test_errors_are_told_to_the_model() -> None:
    async with serving_script() as (url, _), client_of(url) as client:
        assert "prompt" in await refusal(client, "chat")
        assert "stop" in await refusal(client, "chat", prompt="Hi", stop=["x"])
        assert "max_tokens" in await refusal(client, "chat", prompt="Hi", max_tokens=0)
        assert "role" in await refusal(
            client, "chat", prompt="Hi", history=[{"role": "judge", "content": ""}]
        )
        assert "--embeddings" in await refusal(client, "embed", texts=["a"])
        assert "--reranking" in await refusal(client, "rerank", query="q", documents=["a"])
        assert "token" in await refusal(client, "detokenize", tokens=[10**9])
        assert "no tool" in await refusal(client, "sing")


async def test_a_server_with_a_key_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with serving_at(path, answering("Hello!"), api_keys=("secret",)):
        async with client_of("http://localhost", socket_path=str(path)) as client:
            assert "key" in (await refusal(client, "chat", prompt="Hi")).lower()
            assert "key" in (await refusal(client, "list_models")).lower()
        async with client_of("http://localhost", socket_path=str(path), api_key="secret") as client:
            assert (await answer(client, "chat", prompt="Hi"))["text"] == "Hello!"


def http_answer(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (http_answer(b"Bad Gateway", "502 Bad Gateway"), "status 502: Bad Gateway"),
        (http_answer(b"data: {nonsense\n\n"), "does not answer as expected"),
        (http_answer(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'), "has no end"),
        (http_answer(b'data: {"error": {"message": "It broke."}}\n\n'), "It broke."),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata", "is lost"),
        (b"SSH-2.0\r\n", "is lost"),
    ],
)
async def test_what_answers_is_no_good(sent: bytes, told: str) -> None:
    with serving_bytes(sent) as address:
        async with client_of(f"http://127.0.0.1:{address.port}") as client:
            assert told in await refusal(client, "chat", prompt="Hi", model="m")


async def test_nobody_answers() -> None:
    async with client_of("http://127.0.0.1:9") as client:
        assert "No server answers at http://127.0.0.1:9" in await refusal(client, "list_models")


async def test_all_tools_say_what_they_take_and_give() -> None:
    async with client_of("http://127.0.0.1:9") as client:
        tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == [
        "chat",
        "embed",
        "rerank",
        "tokenize",
        "detokenize",
        "list_models",
    ]
    for tool in tools:
        assert tool.input_schema["type"] == "object"
        assert tool.output_schema is not None
        assert tool.output_schema["type"] == "object"
        assert "$ref" not in json.dumps([tool.input_schema, tool.output_schema])
        described = tool.input_schema["properties"].values()
        assert all(one["description"] for one in described)
