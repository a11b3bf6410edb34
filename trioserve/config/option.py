"""`option`: a field of the configuration with its flags and its valid values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trioserve.config.readers import Reader, integer, integers, names, number, numbers
from trioserve.errors import ConfigError

#: For each field type: the accepted Python types, its name in errors, and its reader. Switches
#: have none.
KINDS: Mapping[str, tuple[tuple[type, ...], str, Reader | None]] = {
    "int": ((int,), "an integer", integer),
    "float": ((int, float), "a number", number),
    "bool": ((bool,), "true or false", None),
    "bool | None": ((bool, type(None)), "true or false", None),
    "str": ((str,), "text", str),
    "str | None": ((str, type(None)), "text", str),
    "tuple[str, ...]": ((tuple,), "a tuple of strings", names),
    "tuple[int, ...]": ((tuple,), "a tuple of integers", integers),
    "tuple[float, ...]": ((tuple,), "a tuple of numbers", numbers),
}


def option(
    default: Any,
    flags: str | None = None,
    *,
    choices: tuple[str, ...] | None = None,
    min: float | None = None,
    max: float | None = None,
    **metadata: Any,
) -> Any:
    """Make an attrs field with its flags, variable, help and valid values.

    Args:
        default: the default value.
        flags: as `split_names` reads them; empty: derived from the name of the field.
        choices: the only valid values.
        min: the smallest valid number.
        max: the largest valid number.
        metadata: ``group``, its heading in lists, and ``help``, a line for ``--help``. Optional:
            ``read``, a reader other than the type's; ``synonyms``, replacements for texts; and
            ``check``, a check of `trioserve.config.checks`.
    """
    metadata |= {"flags": flags, "choices": choices}
    return attrs.field(default=default, metadata=metadata, validator=_check(choices, min, max))


def split_names(names: str) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """Split ``"-x --xyz | -no-x --no-xyz VARIABLE"``.

    Returns the flags, those that switch it off (after the bar), and the environment variable.
    """
    words = names.split()
    variable = None if words[-1].startswith("-") else words.pop()
    bar = words.index("|") if "|" in words else len(words)
    return tuple(words[:bar]), tuple(words[bar + 1 :]), variable


def _check(
    choices: tuple[str, ...] | None, min: float | None, max: float | None
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        name = attribute.name
        types, kind, _ = KINDS[str(attribute.type)]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"{name} must be {kind}, not {value!r}")
        if choices is not None and value not in choices:
            one_of = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
            raise ConfigError(f"{name} must be {one_of}, not {value!r}")
        if not isinstance(value, (int, float)):
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} must be finite, not {value}")
        if min is not None and value < min:
            raise ConfigError(f"{name} must be at least {min}, not {value}")
        if max is not None and value > max:
            raise ConfigError(f"{name} must be at most {max}, not {value}")

    return check
