"""The command `trioserve`, in a separate process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import trio


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trioserve", *argv], capture_output=True, text=True, timeout=60
    )


@attrs.define
class Running:
    """A server in a separate process, and its log lines as they arrive."""

    process: trio.Process
    lines: trio.MemoryReceiveChannel[dict[str, Any]]
    url: str = ""

    async def line(self, event: str) -> dict[str, Any]:
        """Wait for the next log line of that event."""
        async for line in self.lines:
            assert line["level"] != "error", line
            if line["event"] == event:
                return line
        raise AssertionError(f"the log ended without {event!r}")

    def lines_so_far(self) -> list[dict[str, Any]]:
        """Take the log lines that have come, and were not taken before."""
        taken = []
        while self.lines.statistics().current_buffer_used:
            taken.append(self.lines.receive_nowait())
        return taken

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30)


async def _read_lines(
    stderr: trio.abc.ReceiveStream, lines: trio.MemorySendChannel[dict[str, Any]]
) -> None:
    rest = b""
    async with lines:
        async for data in stderr:
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                lines.send_nowait(json.loads(line))


@asynccontextmanager
async def serving(
    *argv: str, prefix: Sequence[str] = (), timeout: float = 120
) -> AsyncIterator[Running]:
    """Run the command, wait until the model is there, and make sure that it ends.

    What is in `prefix` comes before the command, to run it in another way. All of it may take
    `timeout` seconds.
    """
    command = [*prefix, sys.executable, "-m", "trioserve", "--port", "0", "-t", "1", *argv]
    send, receive = trio.open_memory_channel[dict[str, Any]](10_000)
    environ = {name: text for name, text in os.environ.items() if "LLAMA" not in name}
    with trio.fail_after(timeout):
        process = await trio.lowlevel.open_process(
            command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environ
        )
        async with trio.open_nursery() as nursery:
            assert process.stderr is not None
            nursery.start_soon(_read_lines, process.stderr, send)
            running = Running(process, receive)
            try:
                running.url = (await running.line("listening"))["url"]
                await running.line("ready")
                yield running
            finally:
                if process.returncode is None:
                    process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
