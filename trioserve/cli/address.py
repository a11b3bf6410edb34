"""Addresses on command lines: `Address`, that of a server for client commands, and ``--http``."""

from __future__ import annotations

from urllib.parse import urlsplit

import attrs

from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.whole_numbers import whole_number

_ANYWHERE = ("0.0.0.0", "::")


def place_of(value: str) -> tuple[str, int]:
    """Split the value of ``--http`` into a host, by default loopback, and a port.

    Raises:
        ConfigError: it is neither ``PORT`` nor ``HOST:PORT``.
    """
    host, _, port = value.rpartition(":")
    if (number := whole_number(port, most=2**16 - 1)) is None:
        raise ConfigError(f"--http must be PORT or HOST:PORT, not {value!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", number


@attrs.frozen
class Address:
    """The address of a server: a host and a port, or the path of a Unix socket, and its API key."""

    host: str
    port: int
    prefix: str
    is_secure: bool
    api_key: str | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(cls, url: str | None, config: Config) -> Address:
        """The address from ``--url``; None: the one in the configuration, which has the key.

        Raises:
            ConfigError: the URL is invalid.
        """
        key = next(iter(config.api_keys), None)
        if url is None:
            host = config.host.split(",")[0].strip()
            host = "127.0.0.1" if host in _ANYWHERE else host
            return cls(host, config.port, config.api_prefix, config.ssl_cert_file is not None, key)
        if url.endswith(".sock"):
            return cls(url, 0, config.api_prefix, is_secure=False, api_key=key)
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"--url: {url!r} has no valid port") from None
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise ConfigError(
                f"--url must be an address such as http://127.0.0.1:8080, not {url!r}"
            )
        path = parts.path.rstrip("/").removesuffix("/v1")  # as clients of OpenAI have it
        return cls(parts.hostname, port, path, parts.scheme == "https", key)

    @property
    def socket_path(self) -> str | None:
        return self.host if self.host.endswith(".sock") else None

    @property
    def url(self) -> str:
        """The address as an HTTP URL, also for a Unix socket."""
        if self.socket_path is not None:
            return f"http://localhost{self.prefix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_secure else ''}://{host}:{self.port}{self.prefix}"

    def __str__(self) -> str:
        return self.socket_path or self.url
