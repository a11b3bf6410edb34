"""Hosts and addresses, as `Host`, `Origin` and flags name them: one strict parser for all."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

import attrs

#: RFC 3986, section 3.2.2, without percent-encoding and without a user.
_AUTHORITY = re.compile(
    r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?)\.?(:(?P<port>[0-9]{1,5})?)?"
)
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#@\\]+)")
_PORTS = {"http": 80, "https": 443}


@attrs.frozen
class HostPort:
    """A host, in lower case, an IPv6 address without brackets; and a port, if one is given."""

    host: str
    port: int | None

    def at(self, scheme: str) -> HostPort:
        """Return the same with the port of a scheme where none is given."""
        return self if self.port is not None else HostPort(self.host, _PORTS.get(scheme))


def parse_authority(text: str) -> HostPort | None:
    """Parse ``host[:port]``, the form of `Host`. None: it is invalid."""
    found = _AUTHORITY.fullmatch(text.lower())
    if found is None:
        return None
    host, port = found["host"], int(found["port"]) if found["port"] else None
    if host.startswith("["):
        host = host[1:-1]
        try:
            ip_address(host)
        except ValueError:
            return None
    return None if port is not None and port > 65535 else HostPort(host, port)


def parse_origin(text: str) -> tuple[str, HostPort] | None:
    """Parse an origin into its scheme, and its host with the port. None: it is invalid."""
    found = _ORIGIN.fullmatch(text.lower())
    where = parse_authority(found["authority"]) if found is not None else None
    return None if found is None or where is None else (found["scheme"], where.at(found["scheme"]))


def is_local(host: str) -> bool:
    """True if a name or an address always means this machine, also as ``::ffff:127.0.0.1``."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped  # Python 3.11 and 3.12 do not look inside
    return address.is_loopback
