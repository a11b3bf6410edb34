"""The real llama-server, for tests that compare with it. They run where LLAMA_SERVER names it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

LLAMA_SERVER = os.environ.get("LLAMA_SERVER")


@contextmanager
def llama_server(flags: Sequence[str]) -> Iterator[httpx.Client]:
    """Run llama-server with flags, on a free port."""
    assert LLAMA_SERVER is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [LLAMA_SERVER, *flags, "--no-webui", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _wait_ready(client, process)
            yield client
    finally:
        process.kill()
        process.wait()


def _wait_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, "llama-server has ended"
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.05)
    raise TimeoutError("llama-server is not ready")
