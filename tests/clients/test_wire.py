"""The server as its users run it: as a separate process, on the bundled model."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from tests.support.attacks import ATTACKS, attack, send_mutated
from tests.support.http_server import post
from tests.support.waiting import patiently

pytestmark = pytest.mark.system

CHAT = {"messages": [{"role": "user", "content": "Tell me a long story."}], "temperature": 0}
ENDLESS = CHAT | {"ignore_eos": True}


HYPERCORN = "hypercorn trioserve.app:app --worker-class trio --bind 127.0.0.1:0"
TRIOSERVE = "trioserve --port 0"


@asynccontextmanager
async def serving(tmp_path: Path, command: str, **environ: str) -> AsyncIterator[tuple[str, int]]:
    """Run a command that serves on any free port; gives the base URL and its process id."""
    log = tmp_path / "log"
    env = {name: text for name, text in os.environ.items() if "LLAMA" not in name}
    env |= {"LLAMA_ARG_THREADS": "1", "TRIOSERVE_LOG_FORMAT": "json", **environ}
    with log.open("wb") as stderr:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", *command.split()], stderr=stderr, stdout=stderr, env=env
        )
    try:
        with patiently():
            url = await _url_in(log)
            await _until_ready(url)
        yield url, process.pid
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await process.wait()


async def _url_in(log: Path) -> str:
    while True:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found:
            return found[0]
        await trio.sleep(0.05)


async def _until_ready(url: str) -> None:
    async with httpx.AsyncClient() as client:
        while (await client.get(url + "/health")).status_code != 200:
            await trio.sleep(0.05)


@pytest.mark.parametrize("command", [TRIOSERVE, HYPERCORN])
async def test_no_connection_ends_the_process(tmp_path: Path, command: str) -> None:
    async with serving(tmp_path, command) as (url, pid):
        async with trio.open_nursery() as nursery:
            for data in ATTACKS.values():
                nursery.start_soon(attack, url, data)
        for seed in range(40):
            await send_mutated(url, seed)
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(url + "/completion", json={"prompt": "Hi", "n_predict": 3})
        assert answer.json()["tokens_predicted"] == 3
        os.kill(pid, 0)  # it is still this process


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_an_idle_server_uses_no_cpu(tmp_path: Path) -> None:
    async with serving(tmp_path, TRIOSERVE) as (url, pid):
        async with httpx.AsyncClient(timeout=60) as client:
            await client.post(url + "/completion", json={"prompt": "Hi", "n_predict": 3})
        await trio.sleep(1)
        before = _cpu_seconds(pid)
        await trio.sleep(10)  # idleness takes time
        assert _cpu_seconds(pid) - before < 0.025  # the kernel counts in steps of 0.01


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process; the kernel counts in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_thousand_clients_that_do_not_read(tmp_path: Path) -> None:
    """They wait for slots or leave them full; all other clients are served."""
    n_clients = 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    body = json.dumps(ENDLESS | {"stream": True}).encode()
    limits = {"TRIOSERVE_STALL_TIMEOUT": "2", "TRIOSERVE_UNREAD_TOKENS": "32"}
    async with serving(tmp_path, TRIOSERVE, **limits) as (url, pid), AsyncExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(n_clients):
            stream = await stack.enter_async_context(await trio.open_tcp_stream(host, int(port)))
            await stream.send_all(post("/v1/chat/completions", body))
        async with httpx.AsyncClient(timeout=60) as client:
            await client.get(url + "/health")  # comes after all of them
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(20):
                assert (await client.get(url + "/health")).status_code == 200
        assert _resident_bytes(pid) < 600e6


def _resident_bytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
