"""Ollama's client and a router: what is answered here, and what goes to the models."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import gguf
import ollama
import pytest
import trio

from tests.support.fake_fleet import Routed, entry, routed
from tests.support.http_server import chunks_of, post
from tests.support.ollama_api import ASK, lines_in, with_client
from tests.support.scripts import answering
from tests.support.sentence_pieces import USER_DEFINED, write_sentence_pieces
from trioserve._version import __version__
from trioserve.api.ollama.events import CONTENT_TYPE
from trioserve.chat.template.builtin import CHATML_TOKENS, template_named
from trioserve.errors import ModelLoadError
from trioserve.models import BUNDLED
from trioserve.models.catalog import ModelEntry, Source
from trioserve.router.states import FleetEvent, QueueStatus, Status

MISSING = Path("/nothing.gguf")


def put(router: Routed, *entries: ModelEntry) -> None:
    """Have these models in place of those that there are."""
    router.fleet.catalog.entries = {each.name: each for each in entries}


def bundled(name: str = "small", *args: str, **fields: Any) -> ModelEntry:
    given = {"path": BUNDLED, "size": 5, "version": (10**18, 5), **fields}
    return entry(name, args=("--model", str(BUNDLED), *args), **given)


async def test_the_models_that_are_here_are_listed() -> None:
    async with routed() as router:
        put(
            router,
            bundled(),
            bundled("twin", hidden=True),
            bundled("newer", path=MISSING, version=(2 * 10**18, 1)),
            entry("remote", path=None),
        )

        def use(client: ollama.Client) -> None:
            broken, small = client.list().models
            assert (broken.model, small.model, small.size) == ("newer", "small", 5)
            assert small.details is not None and broken.details is not None
            assert (small.details.family, broken.details.family) == ("llama", "")
            assert small.details.quantization_level == "Q8_0"
            assert small.modified_at is not None and small.modified_at.year == 2001

        await with_client(router.url, use)
        answer = await router.client.get("/api/version")
        assert answer.json()["trioserve"] == __version__


async def test_the_models_that_are_loaded_say_it_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It would look at all objects of the tests.
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)
    backends = {name: answering("Hi") for name in ("one", "gone", "asleep")}
    async with routed(backends, child={"sleep_idle_seconds": 3600}) as router:
        router.processes["gone"].die()
        await router.processes["asleep"].server.sleep()

        def use(client: ollama.Client) -> None:
            (running,) = client.ps().models
            assert (running.name, running.context_length) == ("one", 4096)
            assert running.expires_at is not None and running.expires_at.year < 2300

        await with_client(router.url, use)
        assert (await router.client.head("/api/ps")).status_code == 200
        assert router.fleet.users == []


async def test_a_process_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.api.router.service._WORD", 0.05)
    async with routed(silent={"one"}) as router:
        assert (await router.client.get("/api/ps")).json() == {"models": []}


async def test_a_model_is_shown_by_its_file() -> None:
    async with routed() as router:
        put(
            router,
            bundled("small", "--temp", "0.25", "-c", "512", "--no-mmproj"),
            bundled("vectors", "--embeddings"),
            bundled("missing", path=MISSING),
        )

        def use(client: ollama.Client) -> None:
            for name in ("small", "small:latest", "SMALL", "smal"):
                shown = client.show(name)
                assert shown.modelfile == f"FROM {BUNDLED}\n"
            assert shown.capabilities == ["completion", "tools", "thinking"]
            parameters = dict(each.split() for each in (shown.parameters or "").splitlines())
            assert parameters["temperature"] == "0.25"
            assert parameters["num_ctx"] == "512"
            info: Any = shown.modelinfo
            assert info["general.architecture"] == "llama"
            assert info["llama.context_length"] == 4096
            assert info["llama.rope.freq_base"] > 1
            assert "tokenizer.ggml.tokens" not in info
            assert client.show("vectors").capabilities == ["embedding"]
            for name, message in (("nothing", "There is no model"), ("missing", "not here yet")):
                with pytest.raises(ollama.ResponseError, match=message) as caught:
                    client.show(name)
                assert caught.value.status_code == 404

        await with_client(router.url, use)


@pytest.mark.parametrize(
    ("defined", "template"), [(CHATML_TOKENS, "chatml"), (USER_DEFINED, "plain")]
)
async def test_a_file_without_a_template_has_that_of_its_tokens(
    tmp_path: Path, defined: tuple[str, ...], template: str
) -> None:
    path = write_sentence_pieces(tmp_path / "base.gguf", defined=defined)
    async with routed() as router:
        put(router, bundled("base", "--model", str(path), path=path))

        def use(client: ollama.Client) -> None:
            assert client.show("base").template == template_named(template)

        await with_client(router.url, use)


async def test_the_projector_has_the_modalities(tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    writer = gguf.GGUFWriter(str(projector), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.has_audio_encoder", False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    async with routed() as router:
        put(router, bundled("small", "--mmproj", str(projector)))

        def use(client: ollama.Client) -> None:
            shown = client.show("small")
            assert shown.capabilities == ["completion", "tools", "thinking", "vision"]

        await with_client(router.url, use)


async def test_chats_go_to_the_model_that_they_name() -> None:
    async with routed({"one": answering("I am one"), "two": answering("I am two")}) as router:

        def use(client: ollama.Client) -> None:
            for name in ("one", "two:latest"):
                said = f"I am {name[:3]}"
                messages = ASK["messages"]
                assert client.chat(name, messages).message.content == said
                parts = list(client.chat(name, messages, stream=True))
                assert "".join(each.message.content or "" for each in parts) == said
                assert parts[-1].done
                assert client.generate(name, "Who are you?").response == said
            with pytest.raises(ollama.ResponseError, match="There is no model 'three'") as caught:
                client.chat("three", messages)
            assert caught.value.status_code == 404
            with pytest.raises(ollama.ResponseError, match="top_p") as caught:
                client.chat("one", messages, options={"top_p": -1})
            assert caught.value.status_code == 400

        await with_client(router.url, use)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The models whose download was begun, which this does not do."""
    names: list[str] = []

    async def start(self: object, text: str, *, again: bool) -> str:
        assert again
        names.append(text)
        return f"{text}:Q8_0"

    monkeypatch.setattr("trioserve.router.downloads.Downloads.start", start)
    return names


def event(kind: str, name: str = "a/b:Q8_0", **data: Any) -> FleetEvent:
    return FleetEvent(model=name, event=kind, data=data)


PROGRESS = {"https://hub/m.gguf": {"done": 5, "total": 10}}


@pytest.mark.parametrize(
    ("stream", "fails"), [(True, True), (True, False), (False, True), (False, False)]
)
async def test_a_model_is_pulled(started: list[str], stream: bool, fails: bool) -> None:
    async with routed() as router, trio.open_nursery() as nursery:

        async def tell() -> None:
            while not router.fleet.events.subscribers:
                await trio.sleep(0.01)
            (feed,) = router.fleet.events.subscribers
            feed.put(event("download_finished", "another"))
            feed.put(event("download_progress", **PROGRESS))
            end = event("download_failed", message="No.") if fails else event("download_finished")
            feed.put(end)

        nursery.start_soon(tell)
        body = {"model": "a/b", "stream": stream}
        answer = await router.client.post("/api/pull", json=body)
    assert started == ["a/b"]
    end = {"error": "No."} if fails else {"status": "success"}
    if stream:
        pulling = {"status": "pulling m.gguf", "digest": "https://hub/m.gguf"}
        assert lines_in(answer.text) == [
            {"status": "pulling manifest"},
            {**pulling, "total": 10, "completed": 5},
            end,
        ]
    else:
        assert answer.status_code == (502 if fails else 200)
        assert json.loads(answer.text) == end


async def test_only_what_was_downloaded_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[object] = []
    monkeypatch.setattr("trioserve.models.hub.remove", removed.append)
    async with routed() as router:
        put(router, bundled(), bundled("a/b:Q8_0", source=Source.CACHE))

        def use(client: ollama.Client) -> None:
            assert client.delete("a/b:Q8_0").status == "success"
            # A part of a name, or another case of it, is no name of what is to be deleted.
            unknown = dict.fromkeys(("nothing", "b:Q8", "A/B:Q8_0"), 404)
            for name, status in {"small": 400, **unknown}.items():
                with pytest.raises(ollama.ResponseError) as caught:
                    client.delete(name)
                assert caught.value.status_code == status

        await with_client(router.url, use)
    assert [str(each) for each in removed] == ["a/b:Q8_0"]


def streaming(
    router: Routed, path: str, body: dict[str, Any]
) -> AbstractAsyncContextManager[Callable[[], Awaitable[str]]]:
    """Ask for a stream of lines; gives what waits for its next part."""
    return chunks_of(router.url, post(path, json.dumps(body).encode()), CONTENT_TYPE)


@pytest.mark.system
@pytest.mark.parametrize(
    ("path", "empty"),
    [
        ("/api/chat", {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {"response": ""}),
    ],
)
async def test_a_stream_whose_model_loads_has_empty_parts(path: str, empty: dict[str, Any]) -> None:
    body = {**ASK, "model": "one", "prompt": "Hi", "sse_ping_interval": 0.1}
    async with routed({"one": None}) as router:
        router.fleet.news = [QueueStatus(position=0, status=Status.LOADING)]
        async with streaming(router, path, body) as next_chunk:
            for _ in range(2):
                (part,) = lines_in(await next_chunk())
                assert part.pop("created_at")
                assert part == {"model": "one", **empty, "done": False}
            await router.load("one", answering("Hello"))
            rest = ""
            while '"done":true' not in rest:
                rest += await next_chunk()
        assert lines_in(rest)[-1]["done_reason"] == "stop"


async def test_a_stream_whose_model_cannot_be_loaded_ends_with_the_error() -> None:
    body = {**ASK, "model": "one", "sse_ping_interval": 0.1}
    async with routed({"one": None}) as router:
        router.fleet.news = [QueueStatus(position=0, status=Status.LOADING)]
        async with streaming(router, "/api/chat", body) as next_chunk:
            assert '"done":false' in await next_chunk()
            router.fleet.failures["one"] = ModelLoadError("It is broken.")
            router.fleet.change()
            part = await next_chunk()
            while '"done":false' in part:
                part = await next_chunk()
        assert lines_in(part) == [{"error": "It is broken."}]
        router.fleet.news = []
        answer = await router.client.post("/api/chat", json=body)
        assert (answer.status_code, answer.json()) == (503, {"error": "It is broken."})


async def test_a_model_is_not_loaded_to_be_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would look at all objects of the tests.
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)
    async with routed({"one": answering("Hi"), "two": None}) as router:

        def use(client: ollama.Client) -> None:
            for name in ("one", "two"):
                assert client.generate(name, keep_alive=0).done_reason == "unload"
                assert client.chat(name, [], keep_alive="0s").done_reason == "unload"
            assert client.generate("one", keep_alive=60).done_reason == "load"

        await with_client(router.url, use)
