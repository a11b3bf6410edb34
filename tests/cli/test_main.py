"""The command, when it does not serve."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import run
from trioserve.models import BUNDLED

pytestmark = pytest.mark.system


def test_a_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "missing.gguf"
    result = run("-m", str(path))
    assert result.returncode == 1
    assert result.stderr == f"trioserve: No such file: {path}.\n"


def test_a_model_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(BUNDLED.read_bytes()[: BUNDLED.stat().st_size // 2])
    result = run("-m", str(path), "--port", "0")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    said = [json.loads(line) for line in result.stderr.splitlines()]
    about = [line for line in said if f"The model file {path} is cut short" in line["event"]]
    assert len(about) == 1
    assert about[0]["level"] == "error"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port))
    assert result.returncode == 1
    assert result.stderr == (
        f"trioserve: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_a_host_that_nobody_knows() -> None:
    result = run("--host", "no.such.host.invalid", "--port", "0")
    assert result.returncode == 1
    assert result.stderr.startswith("trioserve: cannot listen on no.such.host.invalid:0: ")


def test_the_command_imports_no_server_before_it_serves() -> None:
    script = "import sys, trioserve.cli.main; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert {"trioserve.server", "numpy", "llama_cpp"}.isdisjoint(result.stdout.decode().split())
