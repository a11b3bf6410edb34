"""A server without requests does nothing: its threads sleep, and nothing wakes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.support.command import serving
from trioserve.models import BUNDLED

SECONDS = 10.0
#: What may wake a thread now and then: a watchdog, or a step that drops what nobody has used.
MOST_WAKE_UPS = 30


def wake_ups(pid: int) -> int:
    """Count how often threads of a process have waited for something until now."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        count += int(lines["voluntary_ctxt_switches"])
    return count


def children(pid: int) -> list[int]:
    """Find the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in tasks for child in one.read_text().split()]


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
async def test_an_idle_server_is_not_woken() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with serving("-m", str(BUNDLED)) as running, running.client() as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        await client.aclose()
        await trio.sleep(5)  # what an answer leaves to do is done by then
        pids = [running.process.pid, *children(running.process.pid)]
        before = sum(map(wake_ups, pids))
        await trio.sleep(SECONDS)
        assert sum(map(wake_ups, pids)) - before <= MOST_WAKE_UPS
