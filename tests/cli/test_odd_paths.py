"""Files whose names have bytes that are no UTF-8."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import serving
from tests.support.lora_files import make_lora
from trioserve.models import BUNDLED

pytestmark = pytest.mark.system


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a new model, where standard output takes nothing but UTF-8."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    folder = tmp_path / os.fsdecode(b"\xfe")
    folder.mkdir()
    return str(shutil.copy(BUNDLED, folder / os.fsdecode(b"b\xffd.gguf")))


async def test_a_server(model: str) -> None:
    adapter = make_lora(Path(model).with_name(os.fsdecode(b"l\xff.gguf")))
    async with serving("-m", model, "--lora", str(adapter)) as running, running.client() as client:
        assert all("not tried" not in line["event"] for line in running.lines_so_far())
        for path in ("/v1/models", "/props", "/lora-adapters", "/api/tags", "/api/ps"):
            assert (await client.get(path)).json(), path
        listed, lora = (await client.get("/v1/models")).json()["data"]
        assert (listed["id"], lora["id"]) == (r"b\xffd.gguf", r"l\xff")
        messages = [{"role": "user", "content": "Hello"}]
        for one in (listed, lora):
            body = {"model": one["id"], "messages": messages, "max_tokens": 2}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_router(model: str) -> None:
    folder = os.path.dirname(model)
    async with serving("--models-dir", folder) as running, running.client() as client:
        body = {"model": r"b\xffd", "prompt": "Hello", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("words", [["show"], ["doctor", "-m"], ["config", "show", "-m"]])
def test_commands(model: str, words: list[str]) -> None:
    command = [sys.executable, "-m", "trioserve", *words, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert r"b\udcffd.gguf" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")
