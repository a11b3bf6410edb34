"""LoRA adapters: loaded, scaled, taken in turns, and never mixed up in a cache."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.support.clients import client_and_service, client_of
from tests.support.http_server import serving
from tests.support.lora_files import make_lora
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.engine.planner import AdapterTurns
from trioserve.errors import ConfigError, EngineError, InvalidRequestError, ModelLoadError
from trioserve.llama import load
from trioserve.models import BUNDLED
from trioserve.server import Server
from trioserve.server.adapters import AdapterScales
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import AdapterInfo

PROMPT = "Once upon a time there was a"
ADAPTERS = (AdapterInfo(path="a.gguf"), AdapterInfo(path="b.gguf", scale=0.0))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("lora")
    return (
        make_lora(directory / "a.gguf", seed=1, task_name="pirate"),
        make_lora(directory / "b.gguf", seed=2),
    )


# -- turns


def test_one_set_of_adapters_has_all_the_steps() -> None:
    turns = AdapterTurns(2, itertools.count().__next__)
    assert [turns.take([(), ()]) for _ in range(5)] == [()] * 5
    one = ((0, 1.0),)
    assert turns.take([one]) == one
    assert turns.take([]) == one


def test_several_take_turns_and_nobody_starves() -> None:
    turns, a, b = AdapterTurns(2, itertools.count(1).__next__), ((0, 1.0),), ((1, 1.0),)
    taken = [turns.take([(), a]) for _ in range(3)]
    taken += [turns.take([(), a, b]) for _ in range(7)]
    assert taken == [a, a, (), (), a, a, b, b, (), ()]


def test_a_turn_ends_when_nobody_wants_it() -> None:
    turns, a, b = AdapterTurns(100, itertools.count().__next__), ((0, 1.0),), ((1, 1.0),)
    assert [turns.take([a, b]), turns.take([b]), turns.take([a, b])] == [a, b, b]


# -- scales


def test_a_request_that_names_none_gets_what_all_get() -> None:
    scales = AdapterScales(ADAPTERS)
    assert scales.choose(()) == ((0, 1.0),)
    assert scales.choose(((1, 0.5),)) == ((1, 0.5),)
    assert scales.choose(((1, 0.5), (0, 2), (1, -1))) == ((0, 2.0), (1, -1.0))
    assert scales.choose(((0, 0),)) == ()
    scales.set({1: 0.25})
    assert scales.choose(()) == ((1, 0.25),)
    assert scales.scales == (0.0, 0.25)


@pytest.mark.parametrize("infos", [ADAPTERS, ()])
def test_an_adapter_that_is_not_there(infos: tuple[AdapterInfo, ...]) -> None:
    scales = AdapterScales(infos)
    before = scales.scales
    with pytest.raises(InvalidRequestError, match="no LoRA adapter 2") as caught:
        scales.choose(((2, 0),))
    assert caught.value.param == "lora"
    with pytest.raises(InvalidRequestError):
        scales.set({2: 1.0})
    assert scales.scales == before


# -- configuration


def test_flags() -> None:
    argv = ["--lora", 'a.gguf,"b,c.gguf"', "--lora-scaled", "d:e.gguf:0.5,f.gguf:-1"]
    config = parse(argv, {}).config
    assert config.lora_files == (
        ("a.gguf", 1.0),
        ("b,c.gguf", 1.0),
        ("d:e.gguf", 0.5),
        ("f.gguf", -1.0),
    )
    switched_off = parse([*argv, "--lora-init-without-apply"], {}).config
    assert [scale for _, scale in switched_off.lora_files] == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", ["a.gguf", "a.gguf:", ":1", "a.gguf:x", "a.gguf:nan"])
def test_a_scale_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError):
        parse(["--lora-scaled", value], {})


def test_not_with_embeddings() -> None:
    with pytest.raises(ConfigError, match="embeddings"):
        Config(lora=("a.gguf",), embeddings=True)


# -- files


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="No such file"):
        load(Config(lora=(str(tmp_path / "none.gguf"),), ctx_size=256, threads=1))


def test_a_file_that_is_no_adapter() -> None:
    with pytest.raises(ModelLoadError, match="adapter"):
        load(Config(lora=(str(BUNDLED),), ctx_size=256, threads=1))


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    other = make_lora(tmp_path / "other.gguf", arch="gemma")
    with pytest.raises(ModelLoadError, match="mismatch"):
        load(Config(lora=(str(other),), ctx_size=256, threads=1))


def test_an_activated_adapter_is_refused(tmp_path: Path) -> None:
    activated = make_lora(tmp_path / "activated.gguf", invocation=(5, 6))
    with pytest.raises(ModelLoadError, match="activated"):
        load(Config(lora=(str(activated),), ctx_size=256, threads=1))


def test_the_backend_refuses_one_that_is_not_there(files: tuple[Path, Path]) -> None:
    with load(Config(lora=(str(files[0]),), ctx_size=256, threads=1)) as backend:
        assert [info.task_name for info in backend.adapters] == ["pirate"]
        with pytest.raises(EngineError):
            backend.set_adapters(((1, 1.0),))


# -- generation


async def text_of(server: Server, *lora: tuple[int, float], **settings: Any) -> tuple[str, int]:
    done = await server.complete(PROMPT, lora=lora, max_tokens=16, temperature=0.0, **settings)
    return done.text, done.finished.timings.cache_n


async def test_scales_change_the_output(files: tuple[Path, Path]) -> None:
    paths = tuple(map(str, files))
    async with Server(Config(ctx_size=1024, threads=1, cache_ram=0)) as plain:
        expected, _ = await text_of(plain)
    config = Config(ctx_size=1024, threads=1, lora=paths, lora_init_without_apply=True)
    async with Server(config) as server:
        server_texts = {}
        for lora in [(), ((0, 1.0),), ((0, 0.3),), ((0, 0.3), (1, -0.7))]:
            server_texts[lora] = await text_of(server, *lora)
        assert server_texts[()][0] == expected
        assert len({text for text, _ in server_texts.values()}) == 4
        assert [cached for _, cached in server_texts.values()] == [0, 0, 0, 0]
        for lora, (text, _) in server_texts.items():  # the same again, from what was kept
            assert await text_of(server, *lora) == (text, 6)
        assert (await text_of(server, (0, 0.0), (1, 0.0)))[0] == expected
        server.adapters.scales.set({0: 0.3})
        assert (await text_of(server))[0] == server_texts[(0, 0.3),][0]


async def test_in_company_each_has_its_own(files: tuple[Path, Path]) -> None:
    """Side by side, as alone."""
    sets = [(), ((0, 1.0),), ((0, 0.3),), ((0, 0.3), (1, -0.7))]
    async with Server(Config(ctx_size=2048, threads=1, lora=tuple(map(str, files)))) as server:
        server.adapters.scales.set({})
        alone = [await text_of(server, *lora, cache_prompt=False) for lora in sets]
        together: dict[int, tuple[str, int]] = {}

        async def run(i: int) -> None:
            together[i] = await text_of(server, *sets[i % 4], cache_prompt=False)

        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(run, i)
        assert together == {i: alone[i % 4] for i in range(8)}


async def test_a_change_is_for_new_requests() -> None:
    backend = ScriptedBackend(n_slots=1, adapters=ADAPTERS)
    async with Server(Config(), load=scripted(backend)) as server:
        async with server.stream_complete("abc") as stream:
            server.adapters.scales.set({1: 0.5})
            text = "".join([event.text async for event in stream if hasattr(event, "text")])
        assert text == "<0:1>ABC"
        assert (await server.complete("abc")).text == "<1:0.5>ABC"


# -- over HTTP


async def test_the_adapters_over_http(files: tuple[Path, Path]) -> None:
    a, b = map(str, files)
    app = create_app(Config(ctx_size=1024, threads=1, lora=(a, f"{b}:0.5")))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await app.extensions["trioserve"].wait_loaded()

        async def scales() -> list[float]:
            return [each["scale"] for each in (await client.get("/lora-adapters")).json()]

        assert (await client.get("/lora-adapters")).json() == [
            {
                "id": 0,
                "path": a,
                "scale": 1.0,
                "task_name": "pirate",
                "prompt_prefix": "pirate: ",
                "name": "a",
            },
            {"id": 1, "path": b, "scale": 0.5, "task_name": "", "prompt_prefix": "", "name": "b"},
        ]
        answer = await client.post("/lora-adapters", json=[{"id": 1, "scale": -2}])
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        assert await scales() == [0.0, -2.0]
        answer = await client.post("/lora-adapters", json=[])
        assert await scales() == [0.0, 0.0]

        # Not from the cache: a prompt in other batches has other logits, in the last digits.
        body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "cache_prompt": False}
        plain = (await client.post("/completion", json=body)).json()
        assert plain["generation_settings"]["lora"] == []
        body["lora"] = [{"id": 0, "scale": 0.5}]
        other = (await client.post("/completion", json=body)).json()
        assert other["generation_settings"]["lora"] == [{"id": 0, "scale": 0.5}]
        assert other["content"] != plain["content"]
        same = (await client.post("/v1/completions", json=body)).json()
        assert same["choices"][0]["text"] == other["content"]


NO_LIST = (
    "'lora' must be a list of objects with an 'id', from 0 on, and a 'scale', at most 1000000."
)


BAD_SCALES: list[tuple[Any, str]] = [
    ({}, "Request body must be an array"),
    ([1], NO_LIST),
    ([{"scale": 1}], NO_LIST),
    ([{"id": -1}], NO_LIST),
    ([{"id": 0, "scale": 10**400}], NO_LIST),
    ([{"id": 2, "scale": 1}], "There is no LoRA adapter 2: ids run from 0 to 1."),
]


async def test_scales_that_cannot_be_set() -> None:
    async with client_and_service(ScriptedBackend(adapters=ADAPTERS)) as (client, service):
        for body, message in BAD_SCALES:
            answer = await client.post("/lora-adapters", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["message"] == message
            assert error["param"] == ("lora" if body else None)
            assert service.server.adapters.scales.scales == (1.0, 0.0)


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/completion", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
        ("/v1/responses", {"input": "abc"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 50}),
    ],
)
async def test_every_route_that_generates_takes_adapters(path: str, rest: dict[str, Any]) -> None:
    backend = ScriptedBackend(lambda prompt: "said", adapters=ADAPTERS)
    async with (
        client_of(backend) as client,
    ):
        body = {**rest, "lora": [{"id": 1, "scale": 0.5}]}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200
        assert "<1:0.5>said" in answer.text
        answer = await client.post(path, json={**rest, "lora": []})
        assert "<0:1>said" in answer.text
        answer = await client.post(path, json={**rest, "lora": [{"id": 7}]})
        assert answer.status_code == 400
        assert "no LoRA adapter 7" in answer.text
