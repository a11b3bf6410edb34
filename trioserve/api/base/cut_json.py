"""Reads the JSON of a call's arguments, which may be cut short."""

from __future__ import annotations

import json
from typing import Any


def read_arguments(text: str) -> Any:
    """Read the arguments of a call. If they are cut short, keep the complete ones, as SDKs do."""
    head, closing = _cut(text)
    for candidate in (text, text + closing, head):
        try:
            return json.loads(candidate, parse_int=_integer)
        except ValueError:
            continue
    return {}  # it was cut before there was anything


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 4000 else digits  # Python refuses longer ones


def _cut(text: str) -> tuple[str, str]:
    """Cut JSON after its last complete member, closed; and tell what would close all of it."""
    open_: list[str] = []
    at, closing = 0, ""
    in_string = escaped = False
    for i, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in "{[":
            open_.append("}" if character == "{" else "]")
            at, closing = i + 1, "".join(reversed(open_))
        elif character in "}]":
            open_.pop()
            at, closing = i + 1, "".join(reversed(open_))
        elif character == ",":
            at, closing = i, "".join(reversed(open_))
    return text[:at] + closing, "".join(reversed(open_))
