"""Two RPC servers on this machine, and the numbers that are reported at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import attrs
import pytest

from tests.support.measured import pytest_terminal_summary, report
from tests.support.rpc_peer import dead_end
from trioserve.llama.rpc import peers

__all__ = ["pytest_terminal_summary", "report"]


@attrs.define
class RpcServer:
    """``trioserve rpc serve``, which can be started again at the same address."""

    address: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        port = self.address.rpartition(":")[2]
        command = [sys.executable, "-m", "trioserve", "rpc", "serve", "--threads", "1"]
        self.process = subprocess.Popen([*command, "--port", port], stdout=subprocess.DEVNULL)
        peers.greet(self.address, self.address, timeout=60)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it, and wait for its end."""
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(10)


@pytest.fixture(scope="session")
def rpc_servers() -> Iterator[tuple[RpcServer, RpcServer]]:
    if not os.environ.get("TEST_RPC"):
        pytest.skip("needs ggml's RPC backend: run `make test-rpc`")
    servers = RpcServer(dead_end()), RpcServer(dead_end())
    for one in servers:
        one.start()
    yield servers
    for one in servers:
        one.end()
