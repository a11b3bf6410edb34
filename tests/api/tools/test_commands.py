"""Commands that clients have run, end to end: over a socket, and until nothing is left."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.support import waiting
from tests.support.clients import events_in
from tests.support.fences import without_time
from tests.support.http_server import chunks_of, connected, post, serving_script
from tests.support.processes import until
from tests.support.waiting import patiently

pytestmark = pytest.mark.system

JSON = "Content-Type: application/json"


def calling(command: str, *, stream: bool = False) -> bytes:
    body = {"tool": "exec_shell_command", "params": {"command": command}, "stream": stream}
    return post("/tools", json.dumps(body).encode(), JSON)


@asynccontextmanager
async def commands(folder: Path, **config: Any) -> AsyncIterator[str]:
    async with serving_script(
        tools=("exec_shell_command",), tools_dir=(str(folder),), **config
    ) as (url, _):
        yield url


async def call(url: str, command: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"tool": "exec_shell_command", "params": {"command": command}}
        return str((await client.post("/tools", json=body)).json()["plain_text_response"])


async def test_a_folder_that_takes_long_to_remove_is_removed_after_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_time(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "trioserve-tool-of-a-server-that-was-killed").mkdir()

    def is_removed() -> bool:
        return not list(tmp_path.glob("trioserve-tool-*"))

    async with commands(tmp_path) as url:
        await waiting.until(is_removed)
        command = "mkdir -p $TMPDIR/a/b; cd $TMPDIR/a/b; for i in $(seq 1000); do : > $i; done"
        assert "[exit code: 0]" in await call(url, command)
        await waiting.until(is_removed)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_command(tmp_path: Path, stream: bool) -> None:
    mark = f"1000.{os.getpid()}{stream:d}"
    command = f"sleep {mark} & setsid sleep {mark} & sleep {mark}"
    async with commands(tmp_path) as url:
        seconds = []
        for _ in range(3):
            async with connected(url) as connection:
                await connection.send_all(calling(command, stream=stream))
                await until(mark, 3)
            seconds.append(await until(mark, 0))
        assert min(seconds) < 0.1


async def test_output_is_streamed_and_the_pieces_are_the_whole(tmp_path: Path) -> None:
    async with commands(tmp_path) as url:
        async with chunks_of(
            url, calling("echo first; mkfifo pipe; cat pipe; echo last", stream=True)
        ) as next_chunk:
            assert "first" in await next_chunk()
            await trio.to_thread.run_sync((tmp_path / "pipe").write_text, "second\n")
            text = await next_chunk()
            while '"done"' not in text:
                text += await next_chunk()
        *chunks, end = events_in(text, done=False)
        told = "first\n" + "".join(event["chunk"] for event in chunks)
        assert "second\nlast\n" in told and "[exit code: 0]" in told
        assert end == {"done": True, "result": {"plain_text_response": told}}


async def test_output_of_any_length_costs_little(tmp_path: Path) -> None:
    async with commands(tmp_path) as url:
        text = await call(url, "yes | head -c 1000000000")
        assert "[output truncated]" in text and 16_000 < len(text) < 20_000


async def test_after_random_calls_and_cancels_nothing_is_left(tmp_path: Path) -> None:
    mark, chance = f"1002.{os.getpid()}", random.Random(17)
    async with commands(tmp_path) as url:
        await call(url, "true")
        n_open = len(os.listdir("/proc/self/fd"))
        n_tasks = trio.lowlevel.current_statistics().tasks_living

        async def one() -> None:
            command = chance.choice(
                ["true", f"sleep {mark}", f"setsid sleep {mark} & sleep {mark}"]
            )
            with trio.move_on_after(chance.random() * 0.1):
                async with connected(url) as connection:
                    await connection.send_all(calling(command, stream=chance.random() < 0.5))
                    await connection.receive_some()

        for _ in range(6):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(one)
        await until(mark, 0)
        with patiently():
            while (
                len(os.listdir("/proc/self/fd")) > n_open
                or trio.lowlevel.current_statistics().tasks_living > n_tasks
            ):
                await trio.sleep(0.02)
        assert "[exit code: 0]" in await call(url, "true")
