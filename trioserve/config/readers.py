"""How the text after a flag, in a variable or in a file becomes the value of a field.

Every reader raises ValueError with a sentence that quotes the text.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trioserve.types import SAMPLER_LETTERS

Reader = Callable[[str], Any]


def integer(text: str) -> int:
    """Read an integer."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an integer") from None


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
    return tuple(name.strip() for name in text.split(",") if name.strip())


def csv_row(text: str) -> tuple[str, ...]:
    """Read a line of CSV, because patterns and texts may hold a comma, in quotes."""
    try:
        return tuple(next(csv.reader([text], strict=True), ()))
    except csv.Error as error:
        raise ValueError(f"{text!r} cannot be read: {error}") from None


def file(path: str) -> str:
    """Read the file at that path."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path} cannot be read: {reason}") from None


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
        token, found, bias = text.partition(sign)
        if found and token.isdecimal():
            return ((int(token), number(sign + bias)),)
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


_BY_TYPE: Mapping[str, Reader | None] = {
    "bool": None,
    "bool | None": None,
    "int": integer,
    "float": number,
    "str": str,
    "str | None": str,
    "tuple[str, ...]": names,
    "tuple[int, ...]": integers,
    "tuple[float, ...]": numbers,
}

#: Fields that are not read as their type says.
_BY_FIELD: Mapping[str, Reader] = {
    "override_kv": csv_row,
    "override_tensor": csv_row,
    "spec_draft_override_tensor": csv_row,
    "stop": stop_string,
    "lora": csv_row,
    "control_vector": csv_row,
    "api_prefix": lambda text: text.rstrip("/"),
}


def reader_of(field: str, type_name: str) -> Reader | None:
    """Return the reader of a field; a switch has none."""
    return _BY_FIELD.get(field) or _BY_TYPE[type_name]
