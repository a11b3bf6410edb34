"""A server that the system refuses further threads: requests that need one fail, and no others."""

from __future__ import annotations

import base64
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.command import Running, serving
from tests.support.media_files import image_file
from tests.support.waiting import until
from trioserve.models import BUNDLED

pytestmark = pytest.mark.system

#: Runs the command behind it. SIGUSR2 has the system refuse threads. Idle ones end early, and free
#: memory is returned early.
MODEL = ("-m", str(BUNDLED), "--mmproj", str(BUNDLED.with_name("bundled-mmproj.gguf")))

REFUSING = """
import signal, sys, threading, trio._core._thread_cache as cache
def refuse(*_):
    def start(self):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = start
cache.IDLE_TIMEOUT = 0.2
import trioserve.server.limits.memory as memory
memory._TRIM_DELAY = 0.1
signal.signal(signal.SIGUSR2, refuse)
from trioserve.cli.main import main
sys.exit(main(sys.argv[4:]))
"""

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


async def chat(running: Running, **fields: Any) -> tuple[int, str]:
    body = {"messages": HI, "max_tokens": 4, **fields}
    async with running.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.text


def has_workers(pid: int) -> bool:
    """A process has threads of Trio."""
    names = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return any(name.startswith("Trio") for name in names)


async def test_requests_that_need_a_thread_fail_alone() -> None:
    image = f"data:image/png;base64,{base64.b64encode(image_file()).decode()}"
    picture = [{"type": "image_url", "image_url": {"url": image}}]
    needy: list[dict[str, Any]] = [
        {"response_format": GRAMMAR},
        {"messages": [{"role": "user", "content": picture}]},
        {"messages": [{"role": "user", "content": "word " * 3000}]},
    ]
    async with serving(
        *MODEL, "--parallel", "4", prefix=(sys.executable, "-c", REFUSING)
    ) as running:
        for fields in needy:
            assert (await chat(running, **fields))[0] == 200
        running.process.send_signal(signal.SIGUSR2)
        await until(lambda: not has_workers(running.process.pid))
        for fields in needy:
            status, text = await chat(running, **fields)
            assert (status, "unavailable_error" in text) == (503, True), text
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(_chats, running)
        running.process.terminate()
        assert await running.process.wait() == 0


async def _chats(running: Running) -> None:
    assert (await chat(running))[0] == 200
