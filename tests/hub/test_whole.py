"""The command and a hub: served from there, killed in the middle, and shared between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import pytest
import trio

from tests.hub.server import Hub
from tests.support.command import serving
from trioserve import Config, Server
from trioserve.cli.main import main
from trioserve.models import BUNDLED
from trioserve.models.hub import cached_models

pytestmark = pytest.mark.system

REPO = "user/repo"
MODEL = BUNDLED.read_bytes()


@pytest.fixture(autouse=True)
def _full_hub(hub: Hub) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": MODEL})


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run `trioserve` in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trioserve", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def parts_of(cache: Path) -> list[int]:
    """The sizes of what is there of files that are not whole."""
    return [path.stat().st_size for path in cache.glob("models--*/blobs/*.incomplete")]


def wait_for_a_megabyte(cache: Path) -> None:
    """Wait until a part of a model is on the disk."""
    until = monotonic() + 20
    while monotonic() < until:
        if any(size >= 2**20 for size in parts_of(cache)):
            return
        sleep(0.01)
    raise AssertionError("nothing came")


async def test_a_model_is_downloaded_and_served(hub: Hub) -> None:
    async with serving("-hf", REPO) as running, running.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["user/repo:Q8_0"]
        answer = await client.post("/v1/completions", json={"prompt": "one", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
    assert len(hub.downloads()) == 1


async def test_a_signal_ends_a_server_that_downloads(hub: Hub, cache: Path) -> None:
    hub.hold_after = 2**21
    with running("-hf", REPO, "--port", "0") as process:
        await trio.to_thread.run_sync(hub.holding.wait, 20)
        process.terminate()
        _, log = await trio.to_thread.run_sync(partial(process.communicate, timeout=60))
    assert (process.returncode, "Traceback" in log) == (0, False), log
    assert cached_models() == []


async def test_a_server_in_a_program_downloads_its_model(hub: Hub) -> None:
    async with Server(Config(hf_repo=REPO, threads=1, parallel=1)) as server:
        assert server.model.info.name == f"{REPO}:Q8_0"
        assert len((await server.complete("one", max_tokens=1)).tokens) == 1


def test_a_pull_that_is_killed_leaves_no_model_and_goes_on(hub: Hub, cache: Path) -> None:
    hub.hold_after = 2**21
    with running("pull", REPO) as process:
        wait_for_a_megabyte(cache)
        process.kill()
    (n_kept,) = parts_of(cache)
    assert cached_models() == []
    assert not list(cache.glob("models--*/snapshots/*/*"))
    hub.hold_after = None
    assert main(["pull", REPO]) == 0
    assert hub.downloads()[-1].headers["Range"].startswith(f"bytes={n_kept}-")
    assert cached_models()[0].files[0].read_bytes() == MODEL


def test_two_processes_download_a_model_once(hub: Hub, cache: Path) -> None:
    hub.hold_after = 2**21
    with running("pull", REPO) as first, running("pull", REPO) as second:
        wait_for_a_megabyte(cache)
        hub.go_on.set()
        outputs = [process.communicate(timeout=30) for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(hub.downloads()) == 1


def test_a_hub_without_the_model_ends_the_command(hub: Hub) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "trioserve", "-hf", "user/nothing", "--port", "0"],
        capture_output=True, text=True, timeout=30, env=dict(os.environ),
    )  # fmt: skip
    assert found.returncode == 1
    assert "has no user/nothing" in found.stderr
    assert "Traceback" not in found.stderr
