"""Which addresses may be fetched from: decided for each URL, and for what its name stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

import attrs

from trioserve.config.readers import AllowedHost, parse_host
from trioserve.errors import InvalidMediaError

Address = IPv4Address | IPv6Address

_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192

#: A name of a host. One whose last part begins with a digit is another way to write an address.
_NAME = re.compile(
    r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z_]([a-z0-9_-]*[a-z0-9])?"
)

#: Addresses of everybody, for IPv6.
_UNICAST = ip_network("2000::/3")

#: Addresses that count as public, but lead elsewhere: with an IPv4 address in them (6to4, Teredo),
#: for documentation, or to the host of a virtual machine (Azure).
_UNFIT = tuple(
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
    """Where a URL leads to."""

    scheme: str
    host: str  # in lower case; an IPv6 address without brackets
    port: int
    path: str  # with the query

    @property
    def netloc(self) -> str:
        """Host and port, as a person writes them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Read a URL. Nobody reads it again: another parser might find another host in it.

    Raises:
        InvalidMediaError: it is none that is fetched. The message is a part of a sentence.
    """
    if len(url) > _MAX_URL or not re.fullmatch(r"[!-\[\]-~]+", url):  # no blanks, no backslashes
        raise InvalidMediaError(
            "is at an address that is too long, or has characters to be escaped"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").removesuffix(".")
    except ValueError:
        raise InvalidMediaError("is at an address that makes no sense") from None
    if parts.scheme not in _PORTS:
        raise InvalidMediaError("is at an address that does not begin with http:// or https://")
    if "@" in parts.netloc:
        raise InvalidMediaError("is at an address with a name or a password in it")
    if _literal(host) is None and not _NAME.fullmatch(host):
        raise InvalidMediaError("is at an address whose host cannot be")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)


class FetchRules:
    """The hosts that requests may have files fetched from.

    An entry is a host, ``.example.org`` for all names below it, or ``all``. A port other than 80
    and 443 has to be named: ``example.org:8080``, or ``example.org:*`` for any port. The addresses
    of hosts have to be public ones, except for an address that is named itself, and for a range
    that an entry allows: ``files.internal=10.1.0.0/16``.

    Args:
        entries: the hosts.
        flag: what they were given with.

    Raises:
        ConfigError: an entry cannot be read.
    """

    def __init__(self, entries: Sequence[str], flag: str = "--media-urls") -> None:
        self._flag = flag
        self._entries = [parse_host(entry) for entry in entries]

    def check_target(self, target: Target) -> None:
        """Refuse a host or a port that no entry names.

        Raises:
            InvalidMediaError: none does. The message is a part of a sentence.
        """
        if not any(_takes(entry, target) for entry in self._entries):
            raise InvalidMediaError(f"is at {target.netloc}, which {self._flag} does not allow")

    def check_addresses(self, target: Target, addresses: Iterable[str]) -> list[str]:
        """Check what the name of a host stands for. One bad address is too many.

        Returns the addresses in their order.

        Raises:
            InvalidMediaError: it has none, or one that it must not have: which of both is not said,
                for it would tell what names there are inside of a network.
        """
        entries = [entry for entry in self._entries if _takes(entry, target)]
        found = [ip_address(address) for address in dict.fromkeys(addresses)]
        if not found or not all(
            any(_takes_address(entry, address) for entry in entries) for address in found
        ):
            raise InvalidMediaError(f"is at {target.netloc}, which has no public address")
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
    """Whether an address is one of the internet, that leads nowhere else."""
    if isinstance(address, IPv6Address) and (address not in _UNICAST or address.scope_id):
        return False
    if address.is_multicast or address.is_reserved or any(address in unfit for unfit in _UNFIT):
        return False
    return address.is_global


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
