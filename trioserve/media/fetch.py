"""`Fetcher`: downloads files that requests name by URL.

A server that fetches any URL exposes the services of its machine and of its network to its clients.
`Fetcher` therefore looks up a name once, checks the addresses, and connects to one of them. It does
not leave the look-up to httpcore2, which could get another address, and ignores the proxies of the
environment for the same reason. Each redirect is checked, too.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urljoin, urlsplit

import attrs
import httpcore2
import trio

from trioserve._version import __version__
from trioserve.config.readers import AllowedHost, parse_host
from trioserve.errors import FetchError
from trioserve.fair_limiter import FairLimiter
from trioserve.whole_numbers import whole_number

Address = IPv4Address | IPv6Address

_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192

#: A host name. If its last part begins with a digit, it is another notation of an address.
_NAME = re.compile(
    r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z_]([a-z0-9_-]*[a-z0-9])?"
)

#: Global unicast addresses of IPv6.
_UNICAST = ip_network("2000::/3")

#: Addresses that count as public, but are not: with an embedded IPv4 address (6to4, Teredo), for
#: documentation, or of the host of a virtual machine (Azure).
_NOT_PUBLIC = tuple(
    map(
        ip_network,
        (
            "2001::/23",
            "2001:db8::/32",
            "2002::/16",
            "3fff::/20",
            "192.0.0.0/24",
            "192.88.99.0/24",
            "168.63.129.16",
        ),
    )
)


@attrs.frozen
class Target:
    """The target of a URL."""

    scheme: str
    host: str  # in lower case; an IPv6 address without brackets
    port: int
    path: str  # with the query

    @property
    def netloc(self) -> str:
        """Host and port, as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Parse a URL. Only this parser is used: another one might find a different host.

    Raises:
        FetchError: the URL is invalid or not allowed. The message is a part of a sentence.
    """
    if len(url) > _MAX_URL or not re.fullmatch(r"[!-\[\]-~]+", url):  # no blanks, no backslashes
        raise _invalid("that is too long, or has characters to be escaped")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").removesuffix(".")
    except ValueError:
        raise _invalid("that makes no sense") from None
    if parts.scheme not in _PORTS:
        raise _invalid("that does not begin with http:// or https://")
    if "@" in parts.netloc:
        raise _invalid("with a name or a password in it")
    if _literal(host) is None and not _NAME.fullmatch(host):
        raise _invalid("whose host cannot be")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)


def _invalid(problem: str) -> FetchError:
    return FetchError(f"is at an address {problem}", reason="invalid_tool_input")


def forbidden(problem: str) -> FetchError:
    """Make the error of an address that the rules do not allow."""
    return FetchError(f"is at {problem}", reason="url_not_allowed")


def _unfit(problem: str, reason: str = "url_not_accessible") -> FetchError:
    return FetchError(problem, reason=reason)


class FetchRules:
    """The hosts from which requests may fetch files.

    An entry is a host, ``.example.org`` for all names below it, or ``all``. Ports other than 80
    and 443 must be named: ``example.org:8080``, or ``example.org:*`` for any port. Addresses of
    hosts must be public, except for an address that is an entry, and for a range that an entry
    allows: ``files.internal=10.1.0.0/16``.

    Args:
        flag: the flag that set them, for messages.

    Raises:
        ConfigError: an entry is invalid.
    """

    def __init__(self, entries: Sequence[str], flag: str = "--media-urls") -> None:
        self._flag = flag
        self._entries = [parse_host(entry) for entry in entries]

    def check_target(self, target: Target) -> None:
        """Check that an entry allows a host and a port.

        Raises:
            FetchError: no entry does. The message is a part of a sentence.
        """
        if not any(_takes(entry, target) for entry in self._entries):
            raise forbidden(f"{target.netloc}, which {self._flag} does not allow")

    def check_addresses(self, target: Target, addresses: Iterable[str]) -> list[str]:
        """Check the addresses of a host. All of them must be allowed.

        Returns the addresses in their order.

        Raises:
            FetchError: the host has no address or a forbidden one. The message is the same
                for both, so that it does not reveal which names exist in a network.
        """
        entries = [entry for entry in self._entries if _takes(entry, target)]
        found = [ip_address(address) for address in dict.fromkeys(addresses)]
        if not found or not all(
            any(_takes_address(entry, address) for entry in entries) for address in found
        ):
            raise forbidden(f"{target.netloc}, which has no public address")
        return list(map(str, found))


def _takes(entry: AllowedHost, target: Target) -> bool:
    if not entry.any_port and target.port != (
        _PORTS[target.scheme] if entry.port is None else entry.port
    ):
        return False
    if entry.host.startswith("."):
        return target.host.endswith(entry.host)
    return entry.host in ("", target.host)


def _takes_address(entry: AllowedHost, address: Address) -> bool:
    if entry.range is not None:
        return address in entry.range
    return is_public(address) or entry.host == str(address)


def is_public(address: Address) -> bool:
    """True if an address belongs to the public internet."""
    if isinstance(address, IPv6Address) and (address not in _UNICAST or address.scope_id):
        return False
    if address.is_multicast or address.is_reserved or any(address in each for each in _NOT_PUBLIC):
        return False
    return address.is_global


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


#: Seconds to connect to one of several addresses.
_CONNECT_SECONDS = 10.0

#: Errors of a connection to another server.
FAILURES = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
    ssl.SSLError,
    OSError,
)


@attrs.define(eq=False)
class Dialer:
    """Connects to hosts by their checked addresses."""

    _rules: FetchRules  # the allowed hosts
    _certificates: ssl.SSLContext | None = None  # to trust; None: those of the usual authorities

    async def connection(self, target: Target) -> httpcore2.AsyncHTTPConnection:
        """Create a connection, which opens when a request is sent.

        Raises:
            FetchError: the rules do not allow it. The message is a part of a sentence.
        """
        self._rules.check_target(target)
        addresses = self._rules.check_addresses(target, await _look_up(target))
        if target.scheme == "https" and self._certificates is None:
            self._certificates = await trio.to_thread.run_sync(httpcore2.default_ssl_context)
        return httpcore2.AsyncHTTPConnection(
            httpcore2.Origin(target.scheme.encode(), target.host.encode(), target.port),
            ssl_context=self._certificates,
            network_backend=_Pinned(addresses),
        )


async def read_bounded(
    parts: AsyncIterator[bytes], most: int, too_long: Callable[[], Exception]
) -> bytes:
    """Read the body of an answer. Raises `too_long()`: it has more bytes than it may."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > most:
            raise too_long()
    return bytes(body)


def url_of(target: Target) -> httpcore2.URL:
    """Convert a target for httpcore2."""
    return httpcore2.URL(
        scheme=target.scheme, host=target.host, port=target.port, target=target.path
    )


async def _look_up(target: Target) -> list[str]:
    """Resolve a host name, once."""
    try:
        found = await trio.socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


@attrs.define(eq=False)
class _Pinned(httpcore2.AsyncNetworkBackend):
    """Connects to the checked addresses, and ignores the host that httpcore2 passes."""

    _addresses: Sequence[str]

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address that answers."""
        *others, last = self._addresses
        for address in others:
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return await self._connect(address, port)
        return await self._connect(last, port)

    async def _connect(self, address: str, port: int) -> httpcore2.AsyncNetworkStream:
        backend = httpcore2.TrioBackend()
        return await backend.connect_tcp(address, port, timeout=_CONNECT_SECONDS)


_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)

#: The most concurrent fetches, and those of one client.
_N_FETCHES, _N_FETCHES_EACH = 20, 16

_HEADERS = {
    "User-Agent": f"trioserve/{__version__}",
    "Accept-Encoding": "identity",  # compressed data hide the file's size
}


@attrs.frozen
class Fetched:
    """A file, and where it was found after all redirects."""

    url: str
    body: bytes
    content_type: str


@attrs.define(eq=False)
class Fetcher:
    """Downloads files that requests or models name by URL."""

    _dialer: Dialer
    _max_bytes: int  # the largest size of a file
    _timeout: float  # seconds for a file, from the look-up of its name to its last byte
    _accept: str = "image/*, audio/*, video/*, */*;q=0.5"
    _places: FairLimiter = attrs.field(
        init=False, factory=lambda: FairLimiter(_N_FETCHES, _N_FETCHES_EACH)
    )

    async def fetch(
        self,
        url: str,
        count: Callable[[int], object],
        check: Callable[[Target], object] = lambda _target: None,
    ) -> Fetched:
        """Download a file, with a limit on its time.

        Args:
            count: called with the number of bytes as they arrive; an exception ends the transfer.
            check: raises for a target that may not be reached, also after a redirect.

        Raises:
            FetchError: the file cannot be fetched, or may not be. The message is a part of
                a sentence.
            QueueFullError: too many fetches of the client wait.
        """
        async with self._places.place():
            with trio.move_on_after(self._timeout):
                return await self._follow(url, count, check)
        raise _unfit(f"could not be fetched within {self._timeout:g} seconds")

    async def _follow(
        self, url: str, count: Callable[[int], object], check: Callable[[Target], object]
    ) -> Fetched:
        for _ in range(1 + _MAX_REDIRECTS):
            check(target := parse_url(url))
            body, told, is_redirect = await self._get(target, count)
            if not is_redirect:
                return Fetched(url, body, told)
            try:
                url = urljoin(url, told).partition("#")[0]
            except ValueError:
                raise _invalid("that redirects to none") from None
        raise _unfit(f"is at an address that redirects more than {_MAX_REDIRECTS} times")

    async def _get(self, target: Target, count: Callable[[int], object]) -> tuple[bytes, str, bool]:
        """Send a GET request. Returns the body and its type, or nothing and where to go instead."""
        try:
            async with await self._dialer.connection(target) as connection:
                return await self._exchange(connection, target, count)
        except FAILURES as error:
            raise _unfit(f"could not be fetched from {target.netloc}") from error

    async def _exchange(
        self,
        connection: httpcore2.AsyncHTTPConnection,
        target: Target,
        count: Callable[[int], object],
    ) -> tuple[bytes, str, bool]:
        headers = {"Host": target.netloc, "Accept": self._accept, **_HEADERS}
        async with (
            connection.stream("GET", url_of(target), headers=list(headers.items())) as response,
            aclosing(response.aiter_stream()) as parts,
        ):
            said = {
                name.decode("ascii").lower(): value.decode("latin-1")
                for name, value in response.headers
            }
            if response.status in _REDIRECTS and "location" in said:
                return b"", said["location"], True
            self._check(response.status, said, target)
            body = bytearray()
            async for part in parts:
                count(len(part))
                body += part
                if len(body) > self._max_bytes:
                    raise _unfit("has too many bytes", "content_too_large")
            return bytes(body), said.get("content-type", ""), False

    def _check(self, status: int, said: Mapping[str, str], target: Target) -> None:
        if status != 200:
            raise _unfit(f"is at {target.netloc}, which answers with status {status}")
        if said.get("content-encoding", "identity").lower() != "identity":
            raise _unfit(f"is at {target.netloc}, which sends it compressed")
        length = said.get("content-length")
        if length is not None and whole_number(length, most=self._max_bytes) is None:
            raise _unfit(f"has more than {self._max_bytes} bytes", "content_too_large")
