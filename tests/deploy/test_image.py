"""The image, run as docs/deploy.md says. `make test-image` builds it.

TEST_IMAGE is its name, and CONTAINER_ENGINE the command that runs it, with its flags.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import httpx
import pytest

if "TEST_IMAGE" not in os.environ:
    pytest.skip("no image was built: make test-image builds it", allow_module_level=True)

IMAGE = os.environ["TEST_IMAGE"]
ENGINE = shlex.split(os.environ.get("CONTAINER_ENGINE", "docker"))
RESTRICTED = [
    "--read-only",
    "--tmpfs",
    "/tmp",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
]
PATIENCE = 120.0


def engine(*words: str, status: int = 0) -> str:
    """Run a command of the container engine; gives its output."""
    command = [*ENGINE, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@attrs.frozen
class Container:
    id: str
    http: httpx.Client

    def shell(self, script: str, status: int = 0) -> str:
        return engine("exec", self.id, "sh", "-c", script, status=status)

    def wait_until_ready(self) -> None:
        """Wait for the model. Nothing tells when the port is open, so this asks now and then."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                if self.http.get("/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not yet
            time.sleep(0.2)
        pytest.fail(f"the server did not become ready: {engine('logs', self.id)}")


@contextmanager
def running(*flags: str) -> Iterator[Container]:
    """Run the image with flags of the server, on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = ["--env", f"LLAMA_ARG_PORT={port}", "--env", "LLAMA_ARG_HOST=127.0.0.1"]
    options = ["--network", "host", *variables, *RESTRICTED, "--tmpfs", "/models"]
    container = engine("run", "--detach", *options, IMAGE, *flags)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
            one = Container(container, http)
            one.wait_until_ready()
            yield one
    finally:
        engine("rm", "--force", "--volumes", container)


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    with running("--metrics") as one:
        yield one


def test_it_answers(container: Container) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    answer = container.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert "trioserve:num_requests_waiting" in container.http.get("/metrics").text
    assert "<html" in container.http.get("/").text, "the page is in the image"


def test_the_server_is_no_root_and_cannot_write_to_the_image(container: Container) -> None:
    assert container.shell("id -u") == "10001"
    assert container.shell("grep -E '^(CapEff|NoNewPrivs)' /proc/1/status").split() == [
        "CapEff:",
        "0000000000000000",
        "NoNewPrivs:",
        "1",
    ]
    container.shell("touch /opt/trioserve/x", status=1)
    container.shell("touch /tmp/x")


def test_the_health_check_passes(container: Container) -> None:
    (image,) = json.loads(engine("inspect", "--type", "image", IMAGE))
    found = image["Config"].get("Healthcheck") or image["Healthcheck"]  # Docker's, or Podman's
    first, *check = found["Test"]
    assert first == "CMD"
    engine("exec", container.id, *check)
    container.shell(f"LLAMA_ARG_PORT=1 {shlex.join(check)}", status=1)


def test_ggml_uses_what_the_processor_has(container: Container) -> None:
    flags = container.shell("grep -m1 ^flags /proc/cpuinfo")
    used = container.shell("trioserve --version")
    assert ("AVX2 = 1" in used) == (" avx2 " in flags), used


def test_a_signal_drains() -> None:
    body = {"prompt": "Once upon a time", "n_predict": 2000, "ignore_eos": True, "stream": True}
    with (
        running("--drain-timeout", "60") as one,
        one.http.stream("POST", "/completion", json=body) as answer,
    ):
        events = (line for line in answer.iter_lines() if line.startswith("data:"))
        next(events)
        engine("kill", "--signal", "TERM", one.id)
        *_, last = events
        assert json.loads(last.removeprefix("data:"))["tokens_predicted"] == 2000
        assert engine("wait", one.id) == "0"


def test_a_router_starts_its_models() -> None:
    with running("--models-dir", "/models") as one:
        body = {"model": "bundled", "prompt": "Hello", "n_predict": 4}
        assert one.http.post("/completion", json=body).status_code == 200
        engine("kill", "--signal", "TERM", one.id)
        assert engine("wait", one.id) == "0"


def test_a_server_that_is_still_starting_ends_with_a_signal() -> None:
    container = engine("run", "--detach", "--network", "host", *RESTRICTED, IMAGE, "--port", "0")
    try:
        engine("kill", "--signal", "TERM", container)
        assert engine("wait", container) in {"0", "143"}
    finally:
        engine("rm", "--force", "--volumes", container)
