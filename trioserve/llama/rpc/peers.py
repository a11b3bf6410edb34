"""Checking an RPC server before ggml connects to it, which aborts the process on any surprise.

ggml's protocol: a request is a byte for the command, eight bytes for the length of what follows,
and that. An answer is a length and what follows. Numbers are little-endian. The first command of a
connection must be the greeting, which has the same number in all versions. A server talks to one
client at a time; the others wait for it, for as long as they like.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import time

import attrs

from trioserve.config.readers import parse_rpc
from trioserve.errors import ModelLoadError

#: Seconds that a server has to answer. One that is being restarted may listen again within them.
TIMEOUT = 10.0

_INTERVAL = 0.25

_HELLO, _DEVICE_COUNT, _MEMORY = 14, 15, 11
_CAPABILITIES = bytes(24)  # of the transport: nothing but TCP
_REQUEST, _LENGTH = struct.Struct("<BQ"), struct.Struct("<Q")

#: More than any machine has: a peer that reports more devices is not an RPC server.
_MAX_DEVICES = 64


@attrs.frozen
class Peer:
    """An RPC server that has answered as one.

    Attributes:
        named: its name in the configuration.
        address: its numeric address and port, which is what was checked.
        version: of its protocol.
        memory: for each of its devices, the bytes that are free and those that it has.
    """

    named: str
    address: str
    version: tuple[int, int, int]
    memory: tuple[tuple[int, int], ...]


def is_public(address: str) -> bool:
    """Return True if an address may be reached from the internet; for 10.0.0.5, return False.

    Those of a private network, of a VPN and of this machine may not.
    """
    return ipaddress.ip_address(address).is_global


def locate(named: str, *, allow_public: bool) -> str:
    """Find the address of a server that is named ``HOST:PORT``. Blocks.

    Raises:
        ModelLoadError: there is no such machine, or it is on the public internet and must not be.
    """
    host, port = parse_rpc(named)
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise _problem(named, f"has no IPv4 address: {error.strerror or error}") from None
    address = str(found[0][4][0])
    if is_public(address) and not allow_public:
        raise _problem(
            named,
            f"is {address}, an address of the public internet, where anyone may read and change "
            "what is sent; use a VPN or a tunnel, or set --rpc-allow-public",
        )
    return f"{address}:{port}"


def greet(named: str, address: str, *, timeout: float = TIMEOUT) -> Peer:
    """Talk to a server, and close the connection. Blocks.

    Args:
        named: what to call it in errors.
        address: a numeric IPv4 address and a port.
        timeout: seconds for all of it. While nothing listens there, it is tried again.

    Raises:
        ModelLoadError: it does not answer, or not as an RPC server of this protocol.
    """
    end = time.monotonic() + timeout
    with _connect(named, address, end) as connection:
        talk = _Talk(connection, named, end)
        hello = talk.ask(_HELLO, _CAPABILITIES, 4 + len(_CAPABILITIES))
        version = (hello[0], hello[1], hello[2])
        (n_devices,) = struct.unpack("<I", talk.ask(_DEVICE_COUNT, b"", 4))
        if not 0 < n_devices <= _MAX_DEVICES:
            raise _problem(named, f"says that it has {n_devices} devices")
        memory = []
        for i in range(n_devices):
            answer = talk.ask(_MEMORY, struct.pack("<I", i), 16)
            memory.append(struct.unpack("<QQ", answer))
    return Peer(named, address, version, tuple((free, total) for free, total in memory))


def _connect(named: str, address: str, end: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    while True:
        left = max(end - time.monotonic(), 0.001)
        try:
            return socket.create_connection((host, int(port)), left)
        except OSError as error:
            if time.monotonic() + _INTERVAL >= end:
                why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
                raise _problem(named, f"cannot be reached: {why}") from None
        time.sleep(_INTERVAL)


class _Talk:
    """A connection to a peer that may be an RPC server."""

    def __init__(self, connection: socket.socket, named: str, end: float) -> None:
        self._connection = connection
        self._named = named
        self._end = end

    def ask(self, command: int, body: bytes, length: int) -> bytes:
        """Send a command, and receive an answer that must have this length."""
        try:
            self._connection.settimeout(self._left())
            self._connection.sendall(_REQUEST.pack(command, len(body)) + body)
            head = self._receive(_LENGTH.size)
            if _LENGTH.unpack(head) != (length,):
                raise _problem(self._named, f"is no RPC server of this version: it says {head!r}")
            return self._receive(length)
        except TimeoutError:
            raise _problem(
                self._named,
                "accepts connections but does not answer; it may have another client, for it "
                "serves one at a time, or hang",
            ) from None
        except OSError as error:
            why = error.strerror or error
            raise _problem(self._named, f"has broken the connection: {why}") from None

    def _receive(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            self._connection.settimeout(self._left())
            part = self._connection.recv(length - len(data))
            if not part:
                raise _problem(
                    self._named,
                    "has closed the connection; it is no RPC server, or has another version of "
                    "llama.cpp",
                )
            data += part
        return data

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _problem(named: str, what: str) -> ModelLoadError:
    return ModelLoadError(f"The RPC server {named} {what}.")
