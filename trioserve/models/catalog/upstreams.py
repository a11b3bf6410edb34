"""Upstreams: other servers whose models are offered as if they were here."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import attrs

from trioserve.config import readers
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError
from trioserve.hosts import is_local, parse_authority

_log = logging.getLogger("trioserve.models.catalog")

#: The prefix of an upstream's section.
SECTION = "upstream."

#: A family of routes that an upstream may have.
Api: TypeAlias = Literal["chat", "completions", "embeddings", "rerank", "responses", "messages"]
APIS: Sequence[Api] = ("chat", "completions", "embeddings", "rerank", "responses", "messages")

#: The characters of an address, and of an API key, which is sent as a header.
_VISIBLE = re.compile(r"[!-~]+", re.ASCII)

#: As many first characters of a key may be shown.
_SHOWN = 3


@attrs.frozen(kw_only=True)
class Upstream:
    """Another server, and how its models are offered. Times are in seconds.

    Attributes:
        name: that of its section.
        url: what its paths follow, such as ``https://openrouter.ai/api/v1``.
        key_env: the variable that has its API key; empty: it needs none.
        key_header: the header that the key is sent in.
        models: the models that are offered, and their names there; none: all that it lists.
        prefix: what the names begin with here.
        apis: the routes that it has.
        connect_timeout: until there is a connection.
        timeout: how long it may be silent.
        max_requests: requests that run there at the same time.
        key: its API key.
    """

    name: str
    url: str
    key_env: str = ""
    key_header: Literal["authorization", "x-api-key"] = "authorization"
    models: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    apis: tuple[Api, ...] = ("chat", "completions", "embeddings")
    connect_timeout: float = 10.0
    timeout: float = 600.0
    max_requests: int = 16
    key: str = attrs.field(default="", repr=False)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header with the key, if there is one."""
        if not self.key:
            return []
        scheme = "Bearer " if self.key_header == "authorization" else ""
        return [(self.key_header.encode(), f"{scheme}{self.key}".encode())]

    def without_key(self, text: str) -> str:
        """A text of the upstream, which may repeat the key, or end within it."""
        key = self.key
        if not key:
            return text
        text = text.replace(key, "***")
        n_cut = next((n for n in range(len(key), _SHOWN, -1) if text.endswith(key[:n])), 0)
        return f"{text[:-n_cut]}***" if n_cut else text


def read_upstream(
    name: str, items: Sequence[tuple[str, str]], where: str, environ: Mapping[str, str]
) -> Upstream:
    """Read a section.

    Args:
        name: of the upstream.
        items: its keys and values.
        where: the section, for errors.
        environ: the variables, with the API key.

    Raises:
        ConfigError: a key or a value cannot be used.
    """
    fields: dict[str, Any] = {}
    for key, text in items:
        if (reader := _READERS.get(key)) is None:
            raise ConfigError(f"{where} {key} is not known{did_you_mean(key, _READERS)}")
        try:
            fields[key.replace("-", "_")] = reader(text)
        except ValueError as error:
            raise ConfigError(f"{where} {key}: {error}") from None
    if "url" not in fields:
        raise ConfigError(f"{where} needs the key url")
    if variable := fields.get("key_env"):
        fields["key"] = _key(environ.get(variable, ""), f"{where} key-env: {variable}")
        parts = urlsplit(fields["url"])
        if parts.scheme == "http" and not is_local(parts.hostname or ""):
            _log.warning(
                "%s: the API key is sent without encryption, because url is no https", where
            )
    return Upstream(name=name, **fields)


def _key(text: str, source: str) -> str:
    """Check a key, whose value no error shows."""
    if _VISIBLE.fullmatch(key := text.strip()) is None:
        raise ConfigError(f"{source} is not set, or is no API key")
    return key


def _url(text: str) -> str:
    parts = urlsplit(url := text.rstrip("/"))
    if "@" in parts.netloc:
        raise ValueError("an address has no password; name a variable with key-env")
    is_known = parts.scheme in ("http", "https") and parse_authority(parts.netloc) is not None
    is_known = is_known and _VISIBLE.fullmatch(url) is not None and _is_host(parts.hostname or "")
    if not is_known or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is no address, such as https://example.org/v1")
    return url


def _is_host(name: str) -> bool:
    """True for a name that can be looked up: IDNA can encode it."""
    with suppress(UnicodeError):
        return bool(name.encode("idna"))
    return False


def _models(text: str) -> tuple[tuple[str, str], ...]:
    """Read names, each alone or as ``name here = name there``."""
    pairs = [[part.strip() for part in one.split("=", 1)] for one in readers.names(text)]
    if not all(map(all, pairs)):
        raise ValueError(f"{text!r} is no list of names, such as 'gpt=openai/gpt-5, qwen3'")
    return tuple((pair[0], pair[-1]) for pair in pairs)


def _one_of(*values: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in values:
            raise ValueError(f"{text!r} is not one of {', '.join(values)}")
        return text

    return read


def _apis(text: str) -> tuple[str, ...]:
    return tuple(map(_one_of(*APIS), readers.names(text)))


def _seconds(text: str) -> float:
    if not 0 < (value := readers.number(text)) < float("inf"):
        raise ValueError(f"{text!r} is no number of seconds above 0")
    return value


def _count(text: str) -> int:
    if (value := readers.integer(text)) < 1:
        raise ValueError(f"{text!r} must be at least 1")
    return value


_READERS: Mapping[str, Callable[[str], Any]] = {
    "url": _url,
    "key-env": str.strip,
    "key-header": _one_of("authorization", "x-api-key"),
    "models": _models,
    "prefix": readers.unicode_name,
    "apis": _apis,
    "connect-timeout": _seconds,
    "timeout": _seconds,
    "max-requests": _count,
}
