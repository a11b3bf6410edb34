"""Readers: convert the text of a flag, a variable or a file to the value of a field.

A reader returns the value, or raises ValueError or ConfigError with a sentence that quotes the
text. Functions named ``parse_`` split a value with several parts, such as ``KEY=TYPE:VALUE``.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import tomllib
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import attrs

from trioserve.errors import ConfigError
from trioserve.types import SAMPLER_LETTERS
from trioserve.whole_numbers import whole_number

Reader = Callable[[str], Any]

#: Values of a variable that switch something on or off.
TRUE_WORDS = frozenset({"on", "enabled", "true", "1"})
FALSE_WORDS = frozenset({"off", "disabled", "false", "0"})

#: Words for a field that is on, off or auto.
SWITCH_SYNONYMS = {
    **dict.fromkeys(TRUE_WORDS, "on"),
    **dict.fromkeys(FALSE_WORDS, "off"),
    "-1": "auto",
}


def is_on(text: str, source: str) -> bool:
    """Read a word for on or off. Raises ConfigError for other words, with the source."""
    if text not in TRUE_WORDS | FALSE_WORDS:
        raise ConfigError(f"{source} must be true or false, not {text!r}")
    return text in TRUE_WORDS


def integer(text: str) -> int:
    """Read an integer."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an integer") from None


_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}


def size(text: str) -> int:
    """Read a number of bytes, such as 500MiB or 20GiB. Units are powers of 1,024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no size, such as 500MiB or 20GiB")
    n_bytes = float(found[1]) * 1024 ** (_UNITS[found[2].upper()] if found[2] else 0)
    return int(min(n_bytes, 2**63 - 1))


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def inverse(text: str) -> float:
    """Read a number above 0, and divide 1 by it."""
    value = number(text)
    if not value > 0:
        raise ValueError(f"{text!r} must be greater than 0")
    return 1 / value


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers, separated by commas or slashes."""
    return tuple(number(one) for one in re.split("[,/]", text))


def integers(text: str) -> tuple[int, ...]:
    """Read integers, separated by commas."""
    return tuple(integer(one) for one in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Read names, separated by commas."""
    return tuple(name.strip() for name in unicode_name(text).split(",") if name.strip())


def unicode_name(text: str) -> str:
    """Make a name that JSON can hold of a text that the operating system gave.

    It has ``\\xff`` in place of bytes that are no UTF-8, so that it stays the only one of its kind.
    """
    return os.fsencode(text).decode("utf-8", "backslashreplace") if not text.isascii() else text


def csv_row(text: str) -> tuple[str, ...]:
    """Read a line of CSV: patterns and texts in quotes may contain commas."""
    try:
        return tuple(next(csv.reader([text], strict=True), ()))
    except csv.Error as error:
        raise ValueError(f"{text!r} cannot be read: {error}") from None


def file(path: str, field: str = "") -> str:
    """Read the file at that path.

    Raises:
        ConfigError: it cannot be read; the message names the field, if there is one.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        source = f"{field}: {path}" if field else path
        raise ConfigError(f"{source} cannot be read: {reason}") from None


def file_of_keys(path: str) -> tuple[str, ...]:
    """Read a file with a key on each line; lines that begin with # are comments."""
    lines = (line.strip() for line in file(path).splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


def stop_string(text: str) -> tuple[str, ...]:
    """Read one string with escapes as in C; what is not an escape stays as it is."""

    def one(match: re.Match[str]) -> str:
        byte, letter = match.groups()
        return chr(int(byte, 16)) if byte else _ESCAPES[letter]

    return (re.sub(r"""\\(?:x([0-9a-fA-F]{2})|([nrt\\'"]))""", one, text),)


def dry_breaker(text: str) -> tuple[str, ...]:
    """Read one string, or nothing from ``none``."""
    return () if text == "none" else stop_string(text)


def samplers(text: str) -> tuple[str, ...]:
    """Read names of samplers, separated by semicolons."""
    return tuple(name.strip().replace("-", "_") for name in text.split(";") if name.strip())


def sampler_letters(text: str) -> tuple[str, ...]:
    """Read a letter for each sampler."""
    unknown = sorted(set(text) - set(SAMPLER_LETTERS))
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is not a sampler; the letters are {''.join(SAMPLER_LETTERS)}"
        )
    return tuple(SAMPLER_LETTERS[letter] for letter in text)


def logit_bias(text: str) -> tuple[tuple[int, float], ...]:
    """Read ``15043+1``."""
    for sign in "+-":
        given, found, bias = text.partition(sign)
        if found and (token := whole_number(given)) is not None:
            return ((token, number(sign + bias)),)
    raise ValueError(f"{text!r} must be a token id, + or -, and a number, such as 15043+1")


def scaled_paths(text: str) -> tuple[str, ...]:
    """Read ``PATH:SCALE``, separated by commas."""
    for path in csv_row(text):
        name, _, scale = path.rpartition(":")
        if not name:
            raise ValueError(f"{path!r} must be a path, a colon and a number")
        number(scale)
    return csv_row(text)


def log_level(text: str) -> str:
    """Read llama-server's number: 0 output only, 1 error, 2 warning, 3 info, 4 and more debug."""
    level = integer(text)
    return ("error", "error", "warning", "info")[max(level, 0)] if level <= 3 else "debug"


def path_prefix(text: str) -> str:
    """Read a path without the slash at its end."""
    return text.rstrip("/")


# -- values that hold more than one thing

#: ``HOST[:PORT][=RANGE]``; an IPv6 address is in brackets.
_HOST = re.compile(
    r"(?P<host>\[[0-9a-f:.]+\]|\.?[^\s\[\]:=/@]+)(:(?P<port>[0-9]{1,5}|\*))?(=(?P<range>\S+))?"
)

#: ``HOST:PORT``
_RPC = re.compile(r"(?P<host>[A-Za-z0-9](?:[\w.-]*\w)?):(?P<port>[0-9]{1,5})", re.ASCII)

#: Bytes of a metadata key, and of a text value, in llama.cpp, including the null at its end.
_OVERRIDE_SIZE = 128


@attrs.frozen
class Override:
    """A value that overrides one in the metadata of the model file."""

    key: str
    kind: str  # "int", "float", "bool" or "str"
    value: int | float | bool | str


def parse_override(text: str, field: str = "override_kv") -> Override:
    """Read ``KEY=TYPE:VALUE``.

    Raises:
        ConfigError: it has another form, or exceeds the size that llama.cpp allows.
    """
    key, _, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not key or not colon or kind not in ("int", "float", "bool", "str"):
        raise ConfigError(f"{field} must be KEY=TYPE:VALUE with the type int, float, bool or "
                          f"str, not {text!r}")  # fmt: skip
    if max(len(key.encode()), len(value.encode())) >= _OVERRIDE_SIZE:
        raise ConfigError(f"{field}: the key and the value of {key[:40]!r} must each be "
                          f"shorter than {_OVERRIDE_SIZE} bytes")  # fmt: skip
    if kind == "str":
        return Override(key, kind, value)
    if kind == "bool":
        if value not in ("true", "false"):
            raise ConfigError(f"{field}: {key} must be true or false, not {value!r}")
        return Override(key, kind, value == "true")
    try:
        return Override(key, kind, float(value) if kind == "float" else int(value))
    except ValueError:
        raise ConfigError(f"{field}: {key} must be of type {kind}, not {value!r}") from None


def parse_rpc(text: str, field: str = "rpc") -> tuple[str, int]:
    """Read ``HOST:PORT``, where HOST is a name or an IPv4 address: llama.cpp knows no others.

    Raises:
        ConfigError: it has another form.
    """
    found = _RPC.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 2**16:
        raise ConfigError(f"{field} must be HOST:PORT with the name of a machine or its IPv4 "
                          f"address, not {text!r}")  # fmt: skip
    return found["host"], int(found["port"])


def parse_placement(text: str, field: str = "override_tensor") -> tuple[str, str]:
    """Read ``PATTERN=BUFFER``: a regular expression for tensor names, and their buffer.

    Raises:
        ConfigError: it has another form.
    """
    pattern, _, buffer = text.partition("=")
    if not pattern or not buffer:
        raise ConfigError(f"{field} must be PATTERN=BUFFER, not {text!r}")
    return pattern, buffer


def parse_adapter(text: str, field: str = "lora") -> tuple[str, float]:
    """Read ``PATH`` or ``PATH:SCALE``; the default scale is 1. A path may contain a colon.

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


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Read the text of a file. Raises ConfigError: it is not valid TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # too many digits are no TOMLDecodeError
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


@attrs.frozen
class AllowedHost:
    """An entry of the hosts from which files may be fetched."""

    host: str  # ".example.org": all names below it; "": any
    port: int | None  # None: the usual ones
    range: IPv4Network | IPv6Network | None  # where its addresses must be; None: public ones
    any_port: bool = False


def parse_host(text: str, field: str = "media_urls") -> AllowedHost:
    """Read ``HOST[:PORT][=RANGE]``, which is in a field of the configuration.

    Raises:
        ConfigError: it has another form.
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


def read_mcp_servers(path: str | None, text: str | None) -> dict[str, Any]:
    """Read the configuration of MCP servers: a JSON object with ``mcpServers``, or an empty one.

    If both define a server of the same name, the text takes precedence over the file.

    Raises:
        ConfigError: the file cannot be read, or one of them is not a JSON object.
    """
    texts = []
    if path is not None:
        source = f"mcp_servers_config, the file {path},"
        texts.append((source, file(path, "mcp_servers_config")))
    if text is not None:
        texts.append(("mcp_servers_json", text))
    described: dict[str, Any] = {}
    for source, json_text in texts:
        value = parse_json(json_text, source)
        if not isinstance(value, dict) or not isinstance(value.get("mcpServers", {}), dict):
            raise ConfigError(f"{source} must be a JSON object with an object mcpServers")
        if servers := described.get("mcpServers"):
            value["mcpServers"] = servers | value.get("mcpServers", {})
        described |= value
    return described
