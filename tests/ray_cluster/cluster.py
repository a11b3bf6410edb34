"""A cluster with the application on it, as the tests see it: an address, and processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import attrs
import pytest
import trio

from tests.ray_cluster.processes import Process, below, with_variable
from trioserve.concurrency import alongside
from trioserve.errors import TrioServeError
from trioserve.model_process.connection import Connection, ask, converse
from trioserve.server.model_server import ModelServer

#: Seconds that a cluster may take to start, and to stop.
_START, _STOP = 300, 60

#: Seconds after which what was killed must have been replaced.
RECOVERY = 120.0


@attrs.frozen(kw_only=True)
class Plan:
    """The arguments of `trioserve.ray.build`, and the number of nodes."""

    models: Mapping[str, Any]
    options: Mapping[str, Any]
    nodes: int = 3

    @property
    def n_children(self) -> int:
        """The number of servers of a healthy cluster."""
        return len(self.models) * int(self.options["replicas"])

    @property
    def n_replicas(self) -> int:
        """The number of replicas of a healthy cluster, those of the ingress included."""
        return self.n_children + int(self.options["ingresses"])


class Cluster:
    """A running cluster: its address `url`, and the `plan` that it was started with."""

    def __init__(self, process: subprocess.Popen[str], plan: Plan, log: Path) -> None:
        self.plan = plan
        self._process = process
        self._log = log
        self._told: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._listen, name="ray-cluster", daemon=True).start()
        self.url = str(self._wait_told(_START)["url"])

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told.put(json.loads(line))
        self._told.put({})

    def _wait_told(self, timeout: int) -> dict[str, Any]:
        try:
            told = self._told.get(timeout=timeout)
        except Empty:
            told = {}
        if not told:
            pytest.fail(f"the cluster did not start:\n{self._log.read_text()[-4000:]}")
        return told

    def add_node(self) -> None:
        """Start another node, and wait until it is there."""
        assert self._process.stdin is not None
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        self._wait_told(_START)

    # -- processes

    def processes(self, wanted: Callable[[Process], object] = bool) -> list[Process]:
        """Those that run now."""
        return [process for process in below(self._process.pid) if wanted(process)]

    def children(self) -> list[Process]:
        """The servers."""
        return self.processes(lambda process: process.socket)

    def model_replicas(self) -> list[Process]:
        """Replicas that run a server."""
        found = {}
        for process in self.children():
            parent = process.parent
            while parent is not None and not parent.is_replica:
                parent = parent.parent
            if parent is not None:
                found[parent.pid] = parent
        return list(found.values())

    def ingresses(self) -> list[Process]:
        """Replicas that do not, when all replicas are ready."""
        others = {process.pid for process in self.model_replicas()}
        return [one for one in self.processes(lambda p: p.is_replica) if one.pid not in others]

    def kill_node(self, node: Process) -> None:
        """End a node and all that runs on it, as when the machine loses its power."""
        for process in [node, *below(node.pid)]:
            process.kill()

    # -- what servers say

    async def n_busy(self) -> int:
        """The number of slots in use, of all servers that answer."""
        n = 0
        for child in self.children():
            with suppress(OSError, TrioServeError):
                async with line_to(child) as line:
                    n += await n_busy(line)
        return n

    async def free_after(self, timeout: float) -> float:
        """Wait until no slot is in use; returns the seconds that this took."""
        began = monotonic()
        while busy := await self.n_busy():
            if monotonic() - began > timeout:
                pytest.fail(f"{busy} slots are in use after {timeout:g} seconds")
            await trio.sleep(0.01)
        return monotonic() - began

    async def whole_after(self) -> float:
        """Wait until everything runs that should; returns the seconds that this took."""
        began = monotonic()
        while not await self._is_whole():
            if monotonic() - began > RECOVERY:
                pytest.fail(f"not all replicas are back after {RECOVERY:g} seconds")
            await trio.sleep(0.2)
        return monotonic() - began

    async def _is_whole(self) -> bool:
        children = self.children()
        replicas = self.processes(lambda process: process.is_replica)
        if len(children) != self.plan.n_children or len(replicas) != self.plan.n_replicas:
            return False
        try:
            for child in children:
                async with line_to(child) as line:
                    await ask(line, ModelServer.check_live)
        except (OSError, TrioServeError):
            return False
        return True


@asynccontextmanager
async def line_to(child: Process) -> AsyncIterator[Connection]:
    """Connect to the process of a model directly."""
    assert child.socket is not None
    line = Connection()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(child.socket)
        connection.setblocking(False)
        async with alongside(partial(converse, line, connection, lambda _: None, lambda _: None)):
            yield line


async def n_busy(line: Connection) -> int:
    """The number of a model's slots that are in use."""
    return sum(slot.task_id is not None for slot in (await ask(line, ModelServer.status)).slots)


@contextmanager
def running(plan: Plan, log: Path) -> Iterator[Cluster]:
    """Run a cluster until the end of the block; what it prints goes to a file."""
    # The paths of Ray's sockets are long, and those of Unix sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        Path(folder, "ray").mkdir()
        with _start(plan, log, folder) as process:
            try:
                yield Cluster(process, plan, log)
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(_STOP) == 0, log.read_text()[-4000:]
            finally:
                for one in with_variable("RAY_TMPDIR", folder):
                    one.kill()


def _start(plan: Plan, log: Path, folder: str) -> subprocess.Popen[str]:
    environ = {name: text for name, text in os.environ.items() if "LLAMA" not in name}
    environ |= {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": str(_START),  # a machine that does other things is slow
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ray_cluster.program", json.dumps(attrs.asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environ,
            cwd=Path(__file__).parents[2],
            text=True,
        )
