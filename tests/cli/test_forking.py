"""A router that forks its zygote from itself: what the forks have of it, and what they must not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_status import reports_of
from tests.support.processes import all_processes, parent_of, words
from trioserve.children.parent import VARIABLE
from trioserve.children.reports import Ready
from trioserve.models import BUNDLED

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="forks are of Linux only"),
]

#: Becomes a router, on a socket that systemd would have opened.
ACTIVATE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.closerange(4, 100); "
    "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'}; "
    "os.execv(sys.executable, [sys.executable, '-m', 'trioserve', *sys.argv[2:]])"
)


def sockets(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    return {link for name in folder.iterdir() if (link := os.readlink(name)).startswith("socket:")}


def test_a_zygote_is_a_fork_and_has_no_socket_of_its_router(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").symlink_to(BUNDLED)
    ours, theirs = socket.socketpair()
    listening = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-c", ACTIVATE, str(listening.fileno()), "--models-dir", tmp_path]
    environ = {name: text for name, text in os.environ.items() if "LLAMA" not in name}
    with (
        ours,
        listening,
        subprocess.Popen(
            command, stdin=theirs, pass_fds=[listening.fileno()], env=environ | {VARIABLE: "1"}
        ) as router,
    ):
        links = {f"socket:[{os.fstat(each.fileno()).st_ino}]" for each in (theirs, listening)}
        theirs.close()
        try:
            reports = reports_of(ours)
            next(report for report in reports if isinstance(report, Ready))
            assert links <= sockets(router.pid)
            with socket.create_connection(listening.getsockname()) as client:
                body = json.dumps({"model": "a", "prompt": "Once", "n_predict": 1})
                head = f"POST /completion HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall((head + body).encode())
                assert client.recv(2**16).startswith(b"HTTP/1.1 200")
            forks = [pid for pid in all_processes() if parent_of(pid) == router.pid]
            zygote, model = sorted(forks, key=lambda pid: words(pid, "cmdline")[0] == "trioserve")
            assert words(zygote, "cmdline") == words(router.pid, "cmdline")
            assert len(os.listdir(f"/proc/{zygote}/task")) == 1
            assert len(sockets(zygote)) == 1 and not links & sockets(model)
            router.send_signal(signal.SIGTERM)
            assert router.wait(60) == 0
            assert not [pid for pid in forks if Path(f"/proc/{pid}").exists()], "they were reaped"
        finally:
            router.kill()
