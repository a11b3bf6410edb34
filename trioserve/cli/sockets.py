"""The sockets that a server listens on: TCP, or the path of a Unix socket."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trioserve.config import Config
from trioserve.errors import ConfigError

#: Bytes that the kernel holds for a client that does not read; connections inherit it. Left to
#: itself, the kernel would take megabytes, which is thousands of tokens that nobody reads.
_SEND_BUFFER = 128 * 1024


@contextmanager
def open_sockets(config: Config) -> Iterator[list[socket.socket]]:
    """Bind a socket to each address of `Config.host`; they are closed in the end.

    Raises:
        ConfigError: an address cannot be used.
    """
    hosts = [host.strip() for host in config.host.split(",")]
    with ExitStack() as closing:
        opened = []
        for host in hosts:
            try:
                one = open_socket(host, config.port, reuse=config.reuse_port, both=len(hosts) == 1)
            except OSError as error:
                where = host if host.endswith(".sock") else f"{host}:{config.port}"
                raise ConfigError(f"cannot listen on {where}: {error.strerror}") from None
            closing.callback(_close, one)
            opened.append(one)
        yield opened


def open_socket(host: str, port: int, *, reuse: bool = False, both: bool = True) -> socket.socket:
    """Bind a socket: TCP, where port 0 takes a free one, or a path that ends in ``.sock``.

    With `reuse`, other sockets may be bound to the same port. Without `both`, an IPv6 address
    leaves the port free for IPv4.

    Raises:
        OSError: the name is not known, or the port is taken or not allowed.
    """
    if host.endswith(".sock"):
        return _open_path(Path(host))
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    opened = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # where it would let two servers share a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6 and not both:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened


def _open_path(path: Path) -> socket.socket:
    """Bind a Unix socket, in the place of one that nobody listens on any more."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            if opened.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        opened.bind(str(path))
    except OSError:
        opened.close()
        raise
    return opened


def _close(opened: socket.socket) -> None:
    """Close a socket, and remove the path of a Unix socket."""
    name = opened.getsockname()
    opened.close()
    if isinstance(name, str) and name:
        Path(name).unlink(missing_ok=True)


def url_of(listening: socket.socket, *, secure: bool = False) -> str:
    """The address that clients use."""
    scheme = "https" if secure else "http"
    name = listening.getsockname()
    if isinstance(name, str):
        return f"{scheme}+unix://{name}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
