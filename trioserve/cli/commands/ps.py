"""``trioserve ps``: the models that a running server has loaded."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import attrs

from trioserve.cli.commands import take
from trioserve.cli.units import bytes_text, duration_text
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, UnavailableError

_TIMEOUT = 10.0
_FOR_GOOD = 10 * 365 * 24 * 3600.0
_ANYWHERE = ("0.0.0.0", "::")
_HEADINGS = ("NAME", "STATE", "SIZE", "SLEEPS")


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a variable is wrong.
        UnavailableError: no server answers, or not as one.
    """
    words, switches = take(argv, "--all")
    url, flags = _take_url(words)
    config = parse(flags, environ).config
    found = _models(_Address.of(url, config), next(iter(config.api_keys), None))
    rows = [row for row in found if "--all" in switches or row.state != "unloaded"]
    print(_table([_HEADINGS, *map(attrs.astuple, rows)]), end="")
    return 0


@attrs.frozen(kw_only=True)
class _Row:
    """A line of the table."""

    name: str
    state: str
    size: str
    sleeps: str


def _take_url(words: Sequence[str]) -> tuple[str | None, list[str]]:
    rest = list(words)
    for i, word in enumerate(words):
        if word.startswith("--url="):
            del rest[i]
            return word.partition("=")[2], rest
        if word == "--url":
            if i + 1 == len(words):
                raise ConfigError("--url needs a value")
            del rest[i : i + 2]
            return words[i + 1], rest
    return None, rest


@attrs.frozen
class _Address:
    """Where a server is: a host and a port, or the path of a Unix socket."""

    host: str
    port: int
    prefix: str
    is_secure: bool

    @classmethod
    def of(cls, url: str | None, config: Config) -> _Address:
        if url is None:
            host = config.host.split(",")[0].strip()
            host = "127.0.0.1" if host in _ANYWHERE else host
            return cls(host, config.port, config.api_prefix, config.ssl_cert_file is not None)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"--url: {url!r} has no valid port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--url must be an address such as http://127.0.0.1:8080, not {url!r}"
            )
        return cls(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https")

    def __str__(self) -> str:
        if self.host.endswith(".sock"):
            return self.host
        return f"http{'s' if self.is_secure else ''}://{self.host}:{self.port}{self.prefix}"

    def connect(self) -> http.client.HTTPConnection:
        if self.host.endswith(".sock"):
            connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT)
            connection.sock = _connected(self.host)
            return connection
        kind = http.client.HTTPSConnection if self.is_secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=_TIMEOUT)


def _connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(_TIMEOUT)
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def _get(address: _Address, path: str, api_key: str | None) -> tuple[int, Any]:
    """Ask the server; returns the status and what the body holds, None if that is no JSON.

    Raises:
        UnavailableError: it does not answer.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with closing(address.connect()) as connection:
            connection.request("GET", f"{address.prefix}{path}", headers=headers)
            response = connection.getresponse()
            body = response.read()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnavailableError(
            f"no server answers at {address}: {why}. Start one with `trioserve serve`, or name its "
            "address with --url."
        ) from error
    try:
        return response.status, json.loads(body)
    except ValueError:
        return response.status, None


def _models(address: _Address, api_key: str | None) -> Iterator[_Row]:
    """Ask the server for its models, and for when those in memory are to sleep.

    Raises:
        UnavailableError: it does not answer, or not in this way.
    """
    status, listed = _get(address, "/models", api_key)
    _, running = _get(address, "/api/ps", api_key)
    try:
        if status != http.HTTPStatus.OK:
            raise UnavailableError(f"{address} says: {listed['error']['message']}")
        found = [dict(one) for one in listed["data"]]
        # A server of one model gives it no status, and does not tell that one that sleeps runs.
        tells = bool(running) and "models" in running
        sleeps = {one["name"]: str(one["expires_at"]) for one in (running or {}).get("models", ())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"what answers at {address} does not list models: status {status}."
        ) from error
    for one in found:
        name = str(one.get("id", ""))
        alone = "sleeping" if tells and name not in sleeps else "loaded"
        state = one.get("status") or {"value": alone}
        size = one.get("size") or (one.get("meta") or {}).get("size")
        yield _Row(
            name=name,
            state="failed" if state.get("failed") else str(state.get("value", "")),
            size=bytes_text(size) if isinstance(size, int) and size else "",
            sleeps=_sleeps(sleeps.get(name, "")),
        )


def _sleeps(moment: str) -> str:
    """Say in how long a moment is, in the form of RFC 3339; empty if there is none."""
    try:
        seconds = (datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return ""
    return "never" if seconds > _FOR_GOOD else f"in {duration_text(max(0.0, seconds))}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(f"{line}\n" for line in _lines(rows, widths))


def _lines(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
