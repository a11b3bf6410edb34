"""`option`: a field of the configuration that knows how it is written, and what it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trioserve.errors import ConfigError


def option(
    default: Any,
    *flags: str,
    group: str,
    help: str,
    env: str | None = None,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    off: tuple[str, ...] | None = None,
) -> Any:
    """Make an attrs field that knows its flags, variable, choices and bounds.

    `off` names the flags that switch it off, where they are not ``--no-`` and the flag's name.
    """
    metadata = {
        "flags": flags,
        "env": env,
        "group": group,
        "help": help,
        "choices": choices,
        "negative": off,
    }
    return attrs.field(default=default, metadata=metadata, validator=_check(choices, least, most))


_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text"),
    "tuple[str, ...]": ((tuple,), "a tuple of text"),
    "tuple[float, ...]": ((tuple,), "a tuple of numbers"),
}


def _check(
    choices: tuple[str, ...] | None, least: float | None, most: float | None
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        name = attribute.name
        types, kind = _TYPES[str(attribute.type)]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"{name} is {value!r}, and must be {kind}")
        if choices is not None and value not in choices:
            raise ConfigError(f"{name} is {value!r}, and must be one of {', '.join(choices)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} is {value}, and must be finite")
        if least is not None and value < least:
            raise ConfigError(f"{name} is {value}, and must be at least {least}")
        if most is not None and value > most:
            raise ConfigError(f"{name} is {value}, and must be at most {most}")

    return check
