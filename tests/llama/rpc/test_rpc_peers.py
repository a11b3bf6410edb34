"""An RPC server is checked before ggml connects to it."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.rpc_peer import Handler, answers, closes, dead_end, listening, says
from trioserve.errors import ModelLoadError
from trioserve.llama.rpc import peers


def problem(handle: Handler | None, timeout: float = 5.0) -> str:
    """Return the error about a server."""
    with listening(handle) as address, pytest.raises(ModelLoadError) as caught:
        peers.greet("gpu-box:1", address, timeout=timeout)
    assert caught.value.message.startswith("The RPC server gpu-box:1 ")
    return caught.value.message


def test_a_server_says_what_it_is_and_has() -> None:
    with listening(answers((7, 2, 1), n_devices=2, free=5)) as address:
        found = peers.greet("gpu-box:1", address)
    assert (found.named, found.address) == ("gpu-box:1", address)
    assert (found.version, found.memory) == ((7, 2, 1), ((5, 10), (5, 10)))


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "is no RPC server of this version: it says b'SSH-2.0-'"),
        (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "it says b'HTTP/1.1'"),
        (says(b"\xff" * 64), "is no RPC server of this version"),
        (closes, "has closed the connection"),
        (answers(n_devices=0), "says that it has 0 devices"),
        (answers(n_devices=2**32 - 1), "says that it has 4294967295 devices"),
    ],
)
def test_what_is_no_server_is_told_apart(handle: Handler, message: str) -> None:
    assert message in problem(handle)


@pytest.mark.parametrize("handle", [None, says(b"\x1c"), says((28).to_bytes(8, "little"))])
def test_one_that_does_not_answer_may_have_another_client(handle: Handler | None) -> None:
    assert "it may have another client" in problem(handle, timeout=0.2)


def test_where_nothing_listens_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        address = dead_end()
        attempts: list[float] = []

        def sleep(seconds: float) -> None:
            attempts.append(seconds)
            if len(attempts) == 3:
                port = int(address.rpartition(":")[2])
                stack.enter_context(listening(answers(), port))

        monkeypatch.setattr(peers.time, "sleep", sleep)
        assert peers.greet("here", address).version == (7, 0, 0)
    assert len(attempts) == 3


@pytest.mark.system
def test_where_nothing_listens_that_is_said() -> None:
    with pytest.raises(ModelLoadError, match="here cannot be reached: Connection refused"):
        peers.greet("here", dead_end(), timeout=0.3)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.178.20", False),
        ("172.31.0.1", False),
        ("169.254.10.10", False),
        ("100.101.102.103", False),  # of a VPN such as Tailscale
        ("8.8.8.8", True),
        ("172.32.0.1", True),
        ("100.128.0.1", True),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert peers.is_public(address) is public
    if public:
        with pytest.raises(ModelLoadError, match=f"is {address}, an address of the public inter"):
            peers.locate(f"{address}:50052", allow_public=False)
    assert peers.locate(f"{address}:50052", allow_public=True) == f"{address}:50052"


def test_what_a_name_stands_for_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, *_: object) -> list[tuple[Any, ...]]:
        assert (host, port) == ("gpu-box.example", 50052)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ModelLoadError, match=r"gpu-box.example:50052 is 93\.184\.216\.34"):
        peers.locate("gpu-box.example:50052", allow_public=False)


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object) -> list[tuple[Any, ...]]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ModelLoadError, match="nowhere:1 has no IPv4 address: Name or service not"):
        peers.locate("nowhere:1", allow_public=True)
