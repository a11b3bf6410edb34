"""The process of the server under test, its log and its resources."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from tests.soak.catalogue import KEYS, MAX_BODY
from tests.soak.tally import Tally
from trioserve.models import BUNDLED

#: A small server, whose caches are full and whose queue overflows soon, with short timeouts.
FLAGS = (
    *("--model", str(BUNDLED)),
    *("--host", "127.0.0.1", "--port", "0", "--log-format", "json"),
    *("-t", "1", "-np", "4", "-c", "2048", "-n", "128", "-cram", "4", "--max-queue", "10"),
    *("--api-key", ",".join(KEYS), "--metrics", "--props", "--tools", "read_file"),
    *("--stream-sessions", "100", "--stream-bytes", "40000", "--stream-keep-seconds", "10"),
    *("--timeout", "2", "--stall-timeout", "2", "--unread-tokens", "32"),
    *("--keep-alive-timeout", "2", "--drain-timeout", "30", "--max-body-size", str(MAX_BODY)),
)

#: Seconds in which the model is there, and in which the process ends after SIGTERM.
START_TIMEOUT = 60.0
STOP_TIMEOUT = 40.0

_TOKENS = "trioserve:generation_tokens_total{"


@attrs.frozen(kw_only=True)
class Sample:
    """The resources of the process at one moment, and its work until then."""

    seconds: float
    rss_kib: int
    descriptors: int
    threads: int
    requests: int
    tokens: int


@attrs.define
class Process:
    """The process, and what its log said: lines by event, and the faults in them."""

    process: trio.Process
    tally: Tally
    url: str = ""
    ready: trio.Event = attrs.field(factory=trio.Event)
    events: Counter[str] = attrs.field(factory=Counter)
    tokens: int = 0
    began: float = attrs.field(factory=time.monotonic)  # when the load did

    def sample(self) -> Sample:
        """Look at what the process uses now. Raises OSError when it has ended."""
        folder = Path("/proc") / str(self.process.pid)
        lines = (folder / "status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        if "VmRSS" not in status:
            raise ProcessLookupError(f"process {self.process.pid} has ended")
        return Sample(
            seconds=round(time.monotonic() - self.began, 1),
            rss_kib=int(status["VmRSS"].split()[0]),
            descriptors=len(os.listdir(folder / "fd")),
            threads=int(status["Threads"]),
            requests=self.tally.n_requests,
            tokens=self.tokens,
        )

    def client(self) -> httpx.AsyncClient:
        """A client that has a key."""
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    async def count_tokens(self) -> None:
        """Ask once a second how many tokens were generated, until cancelled."""
        async with self.client() as client:
            while True:
                try:
                    text = (await client.get("/metrics")).text
                except httpx.HTTPError as error:
                    self.tally.fault(f"/metrics: {error!r}")
                else:
                    found = [line for line in text.splitlines() if line.startswith(_TOKENS)]
                    self.tokens = int(float(found[0].split()[-1])) if found else self.tokens
                await trio.sleep(1)

    async def read_log(self) -> None:
        """Take the lines of the log as they come, and note those that should not be there."""
        assert self.process.stderr is not None
        rest = b""
        async for data in self.process.stderr:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, text: bytes) -> None:
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:
            self.tally.fault(f"the log: {text!r}")
            return
        event = line["event"]
        if event == "listening":
            self.url = line["url"]
        elif event == "ready":
            self.ready.set()
        if line["level"] == "warning":
            said = f"{event}: {line['error']}" if "error" in line else event
            self.events[re.sub(r"0x[0-9a-f]+|\d+", "N", said)[:200]] += 1
        elif line["level"] not in ("info", "debug"):
            what = line.get("exception", "")
            self.tally.fault(f"the log, at level {line['level']}: {event} {what}".strip())

    async def terminate(self) -> None:
        """Send SIGTERM, and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        with trio.move_on_after(STOP_TIMEOUT):
            await self.process.wait()
        if self.process.returncode != 0:
            self.tally.fault(f"after SIGTERM, the exit code is {self.process.returncode}")


@asynccontextmanager
async def started(saved: Path, tally: Tally) -> AsyncIterator[Process]:
    """Run the server until its model is there; at the end of the block, make sure that it ends."""
    files = ("--slot-save-path", saved, "--store", saved / "store.db", "--tools-dir", saved)
    command = [sys.executable, "-m", "trioserve", *FLAGS, *map(str, files)]
    environ = {name: text for name, text in os.environ.items() if "LLAMA" not in name}
    process = await trio.lowlevel.open_process(
        command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environ
    )
    try:
        async with trio.open_nursery() as nursery:
            server = Process(process, tally)
            nursery.start_soon(server.read_log)
            with trio.fail_after(START_TIMEOUT):
                await server.ready.wait()
            yield server
            if process.returncode is None:
                process.kill()
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()
