"""A service of systemd: sockets that it opens, and what it is notified of."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import trio

from tests.support.waiting import patiently, until
from trioserve.children.reports import Draining, Failed, Loading, Ready, Sleeping
from trioserve.cli.progress import Reporter, take_reporter
from trioserve.cli.systemd import Notifier, take_sockets
from trioserve.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd runs on Linux only")


def test_sockets_of_another_process_are_not_taken() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a", "HOME": "/"}
    assert take_sockets(environ) == []
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize("count", ["", "-1", "²", "9" * 5000])
def test_what_is_no_number_of_sockets_counts_as_none(count: str) -> None:
    assert take_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count}) == []


def test_a_descriptor_that_is_not_open_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.cli.systemd._FIRST_DESCRIPTOR", 10_000)
    with pytest.raises(ConfigError, match="descriptor 10000"):
        take_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})


def test_a_datagram_socket_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wrong:
        monkeypatch.setattr("trioserve.cli.systemd._FIRST_DESCRIPTOR", os.dup(wrong.fileno()))
        with pytest.raises(ConfigError, match="not a stream socket"):
            take_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})


@pytest.mark.parametrize("prefix", ["", "@"], ids=["path", "abstract"])
def test_states_are_notified(tmp_path: Path, prefix: str) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + path if prefix else path)
        environ = {"NOTIFY_SOCKET": prefix + path}
        status = take_reporter(environ)
        assert environ == {} and status.parent is None
        status.tell(Loading(0.5))
        status.tell(Ready())
        status.tell(Draining())
        status.tell(Failed("two\nlines"))
        assert [systemd.recv(1000).decode() for _ in range(4)] == [
            "STATUS=loading 50%",
            "STATUS=ready\nREADY=1",
            "STATUS=draining\nSTOPPING=1",
            "STATUS=two lines",
        ]


def test_without_systemd_nothing_is_notified(tmp_path: Path) -> None:
    Reporter().tell(Ready())
    Notifier("").tell(READY="1")
    Notifier(str(tmp_path / "nothing")).tell(READY="1")  # systemd is not there


def fill(path: str) -> int:
    """Fill the queue of a socket; returns with how many messages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        for n in itertools.count():
            try:
                other.sendto(b"STATUS=another", path)
            except BlockingIOError:
                return n
    raise AssertionError


async def test_a_full_queue_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr("trioserve.cli.systemd._log", Mock(warning=log.append))
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        n_others = fill(path)
        status = take_reporter({"NOTIFY_SOCKET": path})
        with patiently():
            for report in (Loading(0.0), Ready(), Sleeping(), Draining()):
                await trio.to_thread.run_sync(status.tell, report, abandon_on_cancel=True)
        assert log == ["systemd does not read what it is notified of"]
        told = [systemd.recv(1000).decode() for _ in range(n_others + 1)]
        assert told[-1] == "STATUS=draining\nREADY=1\nSTOPPING=1"
        await until(lambda: "trioserve-notify" not in {one.name for one in threading.enumerate()})


@pytest.mark.system
def test_a_server_on_a_socket_of_systemd(tmp_path: Path) -> None:
    activate = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); "
        "os.environ['LISTEN_PID'] = str(os.getpid()); "
        "os.execv(sys.executable, [sys.executable, '-m', 'trioserve', '-m', sys.argv[2]])"
    )
    model = Path(__file__).parents[2] / "trioserve" / "models" / "bundled.gguf"
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path = str(tmp_path / "web.sock")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with notified, listening:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(120)
        fill(str(tmp_path / "notify"))
        listening.bind(path)
        listening.listen()
        with subprocess.Popen(
            [sys.executable, "-c", activate, str(listening.fileno()), str(model)],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "LISTEN_FDS": "1"},
            pass_fds=(listening.fileno(),),
            stderr=subprocess.DEVNULL,
        ) as server:
            try:
                with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=120) as client:
                    while client.get("http://localhost/health").json() != {"status": "ok"}:
                        pass
                while b"READY=1" not in notified.recv(1000):
                    pass
                server.send_signal(signal.SIGTERM)
                while b"STOPPING=1" not in notified.recv(1000):
                    pass
                assert server.wait(60) == 0
            finally:
                server.kill()
    assert Path(path).is_socket(), "it is systemd's"
