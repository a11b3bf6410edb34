"""The command as a router: many models, each in a separate process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.command import Running, serving
from tests.support.http_server import chunks_of, post
from tests.support.waiting import patiently
from trioserve.cli.serving import catalog_of, fleet_of
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.llama.rpc import library
from trioserve.models import BUNDLED


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory with two models."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").symlink_to(BUNDLED)
    return tmp_path


@asynccontextmanager
async def routing(models: Path, *argv: str) -> AsyncIterator[Running]:
    async with serving("--models-dir", str(models), "-c", "32768", "-np", "2", *argv) as running:
        yield running


def endless(model: str, **fields: object) -> bytes:
    body = {"prompt": "Once", "stream": True, "ignore_eos": True, "model": model, **fields}
    return post("/completion", json.dumps(body).encode())


async def state_of(running: Running, model: str) -> dict[str, Any]:
    async with running.client() as client:
        listed = (await client.get("/models")).json()["data"]
    (state,) = (one["status"] for one in listed if one["id"] == model)
    return dict(state)


async def busy_slots(running: Running, model: str) -> int:
    async with running.client() as client:
        answer = await client.get("/slots", params={"model": model})
    if answer.status_code == 400:
        return 0  # it is not loaded yet
    return sum(slot["is_processing"] for slot in answer.json())


# -- one model or many


def test_a_model_that_is_named_is_served_alone(models: Path) -> None:
    for argv in (["-m", "x.gguf", "--models-dir", str(models)], ["-hf", "user/repo"]):
        assert catalog_of(parse(argv, {}).config, argv, {}) is None


def test_without_models_the_bundled_one_is_loaded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    catalog = catalog_of(Config(), [], {})
    assert catalog is not None
    assert [(one.name, one.load_on_startup) for one in catalog.entries.values()] == [
        ("bundled", True)
    ]
    assert catalog_of(Config(), [], {}, watched=True) is None


def test_models_to_choose_from_make_a_fleet(models: Path) -> None:
    argv = ["--models-dir", str(models), "--models-max", "3"]
    config = parse(argv, {}).config
    catalog = catalog_of(config, argv, {})
    assert catalog is not None
    assert list(catalog.entries) == ["one", "two", "bundled"]
    assert fleet_of(config, catalog).max_models == 3


def test_models_in_the_cache_make_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "models--user--repo" / "snapshots" / ("0" * 40) / "a-Q8_0.gguf"
    file.parent.mkdir(parents=True)
    file.symlink_to(BUNDLED)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    catalog = catalog_of(Config(), [], {})
    assert catalog is not None
    assert list(catalog.entries) == ["user/repo:Q8_0", "bundled"]
    assert not any(one.load_on_startup for one in catalog.entries.values())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    argv = ["--models-dir", str(tmp_path / "none")]
    with pytest.raises(ConfigError, match="cannot be read"):
        catalog_of(parse(argv, {}).config, argv, {})


RPC = ("--rpc", "127.0.0.1:50052")


def test_a_model_that_other_machines_compute_has_a_process_of_its_own(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "check", lambda: None)
    for argv in (["-m", "x.gguf", *RPC], list(RPC)):
        config = parse(argv, {}).config
        catalog = catalog_of(config, argv, {})
        assert catalog is not None
        assert len(catalog.entries) == 1
        (entry,) = catalog.entries.values()
        child = parse(entry.args, {}).config
        assert child.rpc == config.rpc
        assert catalog_of(child, entry.args, {}, watched=True) is None
    argv = ["--models-dir", str(models), *RPC]
    catalog = catalog_of(parse(argv, {}).config, argv, {})
    assert catalog is not None
    assert list(catalog.entries) == ["one", "two", "bundled"]


def test_without_the_library_there_are_no_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="run `trioserve rpc build`"):
        catalog_of(parse(RPC, {}).config, RPC, {})


# -- the command


@pytest.mark.system
async def test_each_model_answers_by_its_name(models: Path) -> None:
    async with routing(models, "--api-key", "secret") as running, running.client() as client:
        client.headers["Authorization"] = "Bearer secret"
        for name in ("one", "two"):
            body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
            answer = await client.post("/v1/chat/completions", json={**body, "max_tokens": 3})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0


@pytest.mark.system
async def test_a_process_that_is_killed_ends_its_streams_at_once(models: Path) -> None:
    async with (
        routing(models) as running,
        chunks_of(running.url, endless("one")) as next_chunk,
        chunks_of(running.url, endless("one")) as other_chunk,
    ):
        await next_chunk()
        await other_chunk()
        state = await state_of(running, "one")
        killed = time.perf_counter()
        os.kill(state["pid"], signal.SIGKILL)
        for each in (next_chunk, other_chunk):
            text = ""
            while '"error"' not in text:
                text = await each()
            error = json.loads(text.removeprefix("data: "))["error"]
            assert error["code"] == "model_process_ended"
        assert time.perf_counter() - killed < 20  # 50 ms on a quiet machine
        async with running.client() as client:  # it is started again
            again = await client.post(
                "/completion", json={"model": "one", "prompt": "a", "n_predict": 1}
            )
            assert again.status_code == 200


@pytest.mark.system
async def test_a_client_that_leaves_frees_its_slot(models: Path) -> None:
    async with routing(models) as running:
        async with await trio.open_tcp_stream(
            "127.0.0.1", int(running.url.rpartition(":")[2])
        ) as connection:
            await connection.send_all(endless("two", stream=False))
            while not await busy_slots(running, "two"):
                await trio.sleep(0.01)
        with patiently():
            while await busy_slots(running, "two"):
                await trio.sleep(0.01)


@pytest.mark.system
async def test_a_signal_drains_the_models(models: Path) -> None:
    async with (
        routing(models) as running,
        chunks_of(running.url, endless("one", n_predict=300)) as next_chunk,
    ):
        await next_chunk()
        running.process.send_signal(signal.SIGTERM)
        text = ""
        while '"stop":true' not in text:
            text = await next_chunk()
        assert await running.process.wait() == 0
