"""A server whose standard error cannot be written: its disk is full, or the pipe has no reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from tests.support.waiting import patiently

pytestmark = pytest.mark.system


@asynccontextmanager
async def serving(
    stderr: int, log_file: Path, *argv: str, redirect: str = ""
) -> AsyncIterator[str]:
    """Run the command; gives the URL. It has to end well on SIGTERM."""
    flags = ["--port", "0", "-t", "1", "--log-file", str(log_file), *argv]
    command = [sys.executable, "-m", "trioserve", *flags]
    if redirect:
        command = ["sh", "-c", f'exec "$0" "$@" {redirect}', *command]
    with patiently():
        process = await trio.lowlevel.open_process(command, stderr=stderr, stdin=subprocess.DEVNULL)
        try:
            while not log_file.exists() or '"ready"' not in log_file.read_text():
                assert process.poll() is None
                await trio.sleep(0.05)
            first = next(line for line in log_file.read_text().splitlines() if "listening" in line)
            yield json.loads(first)["url"]
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()


async def ask(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        for stream in (False, True):
            body = {"prompt": "Once", "n_predict": 3, "ignore_eos": True, "stream": stream}
            answer = await client.post("/completion", json=body)
            assert answer.status_code == 200
            assert "error" not in answer.text


async def test_a_pipe_that_nobody_reads_any_more(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        async with serving(writer, tmp_path / "log") as url:
            os.close(reader)
            await ask(url)
    finally:
        os.close(writer)
    assert '"event": "request"' in (tmp_path / "log").read_text()


async def test_a_pipe_whose_reader_does_not_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)  # as what a shell makes
    try:
        async with serving(writer, tmp_path / "log") as url:
            for _ in range(20):
                await ask(url)
    finally:
        os.close(reader)
        os.close(writer)


async def test_standard_files_that_are_closed(tmp_path: Path) -> None:
    redirect = "<&- >&- 2>&-"
    async with serving(subprocess.DEVNULL, tmp_path / "log", redirect=redirect) as url:
        await ask(url)
