"""Sockets: TCP, IPv6 and paths."""

from __future__ import annotations

import socket
from pathlib import Path

import attrs
import pytest

from trioserve.cli.serving import open_socket, open_sockets, url_of
from trioserve.config import Config
from trioserve.errors import ConfigError


def test_a_socket_on_any_free_port() -> None:
    with open_socket("127.0.0.1", 0) as opened:
        assert url_of(opened) == f"http://127.0.0.1:{opened.getsockname()[1]}"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_the_address_of_ipv6_is_in_brackets() -> None:
    try:
        opened = open_socket("::1", 0)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with opened:
        assert url_of(opened).startswith("http://[::1]:")


def test_a_unix_socket_that_is_in_use_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with open_socket(str(path), 0) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            open_socket(str(path), 0)
    with open_socket(str(path), 0) as second:  # the first has been closed
        assert second.getsockname() == str(path)


def test_two_servers_on_one_port() -> None:
    with open_socket("127.0.0.1", 0, reuse=True) as first:
        first.listen()
        with open_socket("127.0.0.1", first.getsockname()[1], reuse=True) as second:
            assert second.getsockname() == first.getsockname()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6_can_leave_ipv4_alone() -> None:
    try:
        opened = open_socket("::", 0, both=False)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with opened, open_socket("0.0.0.0", opened.getsockname()[1]):
        pass


def test_two_addresses_of_which_one_has_the_other() -> None:
    with open_socket("127.0.0.1", 0) as one:
        port = one.getsockname()[1]
    config = Config(host="0.0.0.0,127.0.0.1", port=port)
    with (
        pytest.raises(ConfigError, match=f"listen on 127.0.0.1:{port}: Address already in use"),
        open_sockets(config),
    ):
        pass
    with open_sockets(attrs.evolve(config, host="127.0.0.1")):  # both are closed
        pass


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    config = Config(host=str(tmp_path / ("x" * 150 + ".sock")))
    with pytest.raises(ConfigError, match=r"x\.sock: AF_UNIX path too long"), open_sockets(config):
        pass


def test_the_kernel_keeps_little_for_a_client_that_does_not_read() -> None:
    """Else a stream runs on for thousands of tokens until its request is paused."""
    with open_socket("127.0.0.1", 0) as opened, socket.socket() as client:
        opened.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(opened.getsockname())
        connection, _ = opened.accept()
        with connection:
            connection.settimeout(1)  # what the other end may still take
            n_bytes = 0
            with pytest.raises(TimeoutError):
                while True:
                    n_bytes += connection.send(bytes(256))
    assert n_bytes < 96 * 1024
