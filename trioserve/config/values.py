"""Fields whose text holds more than one thing: ``KEY=TYPE:VALUE`` and the like, taken apart."""

from __future__ import annotations

import json
import math
import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

import attrs

from trioserve.errors import ConfigError

#: ``HOST[:PORT][=RANGE]``; an IPv6 address is in brackets.
_HOST = re.compile(
    r"(?P<host>\[[0-9a-f:.]+\]|\.?[^\s\[\]:=/@]+)(:(?P<port>[0-9]{1,5}|\*))?(=(?P<range>\S+))?"
)

#: ``HOST:PORT``
_RPC = re.compile(r"(?P<host>[A-Za-z0-9](?:[\w.-]*\w)?):(?P<port>[0-9]{1,5})", re.ASCII)

#: Bytes that llama.cpp has for a key of the metadata, and for a text, each with a null at its end.
_OVERRIDE_SIZE = 128


@attrs.frozen
class Override:
    """A value that replaces one in the metadata of the model file."""

    key: str
    kind: str  # "int", "float", "bool" or "str"
    value: int | float | bool | str


def parse_override(text: str) -> Override:
    """Read ``KEY=TYPE:VALUE``.

    Raises:
        ConfigError: it is not that, or does not fit in the room that llama.cpp has for it.
    """
    key, _, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not key or not colon or kind not in ("int", "float", "bool", "str"):
        raise ConfigError(f"override_kv must be KEY=TYPE:VALUE with the type int, float, bool or "
                          f"str, not {text!r}")  # fmt: skip
    if max(len(key.encode()), len(value.encode())) >= _OVERRIDE_SIZE:
        raise ConfigError(f"override_kv: the key and the value of {key[:40]!r} must each be "
                          f"shorter than {_OVERRIDE_SIZE} bytes")  # fmt: skip
    if kind == "str":
        return Override(key, kind, value)
    if kind == "bool":
        if value not in ("true", "false"):
            raise ConfigError(f"override_kv: {key} must be true or false, not {value!r}")
        return Override(key, kind, value == "true")
    try:
        return Override(key, kind, float(value) if kind == "float" else int(value))
    except ValueError:
        raise ConfigError(f"override_kv: {key} must be of type {kind}, not {value!r}") from None


def parse_rpc(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, where HOST is a name or an IPv4 address: llama.cpp knows no others.

    Raises:
        ConfigError: it is not that.
    """
    found = _RPC.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 2**16:
        raise ConfigError(f"rpc must be HOST:PORT with the name of a machine or its IPv4 address, "
                          f"not {text!r}")  # fmt: skip
    return found["host"], int(found["port"])


def parse_placement(text: str, field: str = "override_tensor") -> tuple[str, str]:
    """Read ``PATTERN=BUFFER``: a regular expression for names of tensors, and where they go.

    Raises:
        ConfigError: it is not that.
    """
    pattern, _, buffer = text.partition("=")
    if not pattern or not buffer:
        raise ConfigError(f"{field} must be PATTERN=BUFFER, not {text!r}")
    return pattern, buffer


def parse_adapter(text: str, field: str = "lora") -> tuple[str, float]:
    """Read ``PATH`` or ``PATH:SCALE``; the scale is 1 if there is none. A path may hold a colon.

    Raises:
        ConfigError: there is no path, or the scale is not finite.
    """
    path, colon, number = text.rpartition(":")
    try:
        scale = float(number) if colon else 1.0
    except ValueError:
        colon, scale = "", 1.0
    if not colon:
        path = text
    if not path or not math.isfinite(scale):
        raise ConfigError(f"{field} must be the path of a file or PATH:SCALE, not {text!r}")
    return path, scale


def parse_json(text: str, field: str) -> Any:
    """Read a JSON value.

    Raises:
        ConfigError: it is not valid JSON; the message names the field.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{field} is not valid JSON: {error}") from None


@attrs.frozen
class AllowedHost:
    """A host that files may be fetched from, or several."""

    host: str  # ".example.org": all names below it; "": any
    port: int | None  # None: the usual ones
    range: IPv4Network | IPv6Network | None  # where its addresses must be; None: public ones
    any_port: bool = False


def parse_host(text: str, field: str = "media_urls") -> AllowedHost:
    """Read ``HOST[:PORT][=RANGE]``, which is in a field of the configuration.

    Raises:
        ConfigError: it is not that.
    """
    found = _HOST.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError(f"{field} has {text!r}, which is not HOST, HOST:PORT or HOST=RANGE")
    try:
        range = None if found["range"] is None else ip_network(found["range"])
    except ValueError as error:
        raise ConfigError(f"{field} has {text!r}: {error}") from None
    host, port = found["host"].strip("[]"), found["port"]
    return AllowedHost(
        "" if host == "all" else host,
        None if port in (None, "*") else int(port),
        range,
        any_port=port == "*",
    )
