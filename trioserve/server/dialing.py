"""Connections to other servers, at addresses that were checked: a name is looked up once.

httpcore would look up a name by itself, and dial what it stands for by then. Proxies of the
environment are not used either, for they would look it up again.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias

import httpcore
import trio

from trioserve.server.fetch_rules import FetchRules, Target

#: Seconds to connect to one of several addresses.
_CONNECT_SECONDS = 10.0

#: What goes wrong between here and another server.
FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    ssl.SSLError,
    OSError,
)

#: Puts something around a connection, before TLS.
Wrap: TypeAlias = Callable[[httpcore.AsyncNetworkStream], httpcore.AsyncNetworkStream]


class Dialer:
    """Connects to servers.

    Args:
        rules: to which.
        certificates: what servers are known by; None: by the usual authorities.
    """

    def __init__(self, rules: FetchRules, certificates: ssl.SSLContext | None = None) -> None:
        self._rules = rules
        self._certificates = certificates

    async def connection(
        self, target: Target, wrap: Wrap = lambda stream: stream
    ) -> httpcore.AsyncHTTPConnection:
        """Make a connection, which is opened when a request is sent.

        Raises:
            InvalidMediaError: the rules do not allow it. The message is a part of a sentence.
        """
        self._rules.check_target(target)
        addresses = self._rules.check_addresses(target, await _look_up(target))
        if target.scheme == "https" and self._certificates is None:
            self._certificates = await trio.to_thread.run_sync(httpcore.default_ssl_context)
        return httpcore.AsyncHTTPConnection(
            httpcore.Origin(target.scheme.encode(), target.host.encode(), target.port),
            ssl_context=self._certificates,
            network_backend=_Pinned(addresses, wrap),
        )


def url_of(target: Target) -> httpcore.URL:
    """Write a target as httpcore takes it."""
    return httpcore.URL(
        scheme=target.scheme, host=target.host, port=target.port, target=target.path
    )


async def _look_up(target: Target) -> list[str]:
    """Look up a name, once."""
    try:
        found = await trio.socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to one of the addresses that were checked, whatever httpcore asks for."""

    def __init__(self, addresses: Sequence[str], wrap: Wrap) -> None:
        self._addresses = addresses
        self._wrap = wrap
        self._backend = httpcore.TrioBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers."""
        *others, last = self._addresses
        for address in others:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._connect(address, port)
        return await self._connect(last, port)

    async def _connect(self, address: str, port: int) -> httpcore.AsyncNetworkStream:
        return self._wrap(await self._backend.connect_tcp(address, port, timeout=_CONNECT_SECONDS))
