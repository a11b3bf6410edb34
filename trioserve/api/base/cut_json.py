"""Reads the JSON of a call's arguments, which may be cut short."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any


def read_arguments(text: str) -> Any:
    """Read the arguments of a call. If they are cut short, keep the complete ones, as SDKs do."""
    head, closing = _cut(text)
    for candidate in (text, text + closing, head + closing):
        with suppress(ValueError, RecursionError):
            return json.loads(candidate, parse_int=_integer)
    return {}  # it was cut before there was anything, or is nested too deeply


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 4000 else digits  # Python refuses longer ones


def _cut(text: str) -> tuple[str, str]:
    """Cut JSON after its last complete member; return that, and what closes it."""
    closing: list[str] = []
    end = 0
    in_string = escaped = False
    for i, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
            end = i + 1
        elif character in "}]" and closing:
            closing.pop()
            end = i + 1
        elif character == ",":
            end = i
    return text[:end], "".join(reversed(closing))
