"""Validators and converters of fields, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from trioserve.errors import InvalidRequestError

INT32_MAX = 2**31 - 1


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def in_range(
    low: float, high: float = math.inf
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Make an attrs validator: a finite number with ``low <= value <= high``."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        wants = int if attribute.type in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, wants):
            kind = "an integer" if wants is int else "a number"
            raise InvalidRequestError(f"'{attribute.name}' must be {kind}.", param=attribute.name)
        if not _is_finite(value) or not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise InvalidRequestError(f"'{attribute.name}' must be {bounds}.", param=attribute.name)

    check.bounds = (low, high)  # type: ignore[attr-defined]
    return check


def is_bool(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate true or false."""
    if not isinstance(value, bool):
        raise InvalidRequestError(
            f"'{attribute.name}' must be true or false.", param=attribute.name
        )


def is_text(max_length: int) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Make an attrs validator: a string with at most so many characters."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, str) or len(value) > max_length:
            raise InvalidRequestError(
                f"'{attribute.name}' must be a string of at most {max_length} characters.",
                param=attribute.name,
            )

    return check


def are_strings(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a tuple of strings."""
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise InvalidRequestError(
            f"'{attribute.name}' must be a list of strings.", param=attribute.name
        )


def to_tuple(value: Any) -> Any:
    """Turn a list into a tuple, and leave the rest to a validator."""
    return tuple(value) if isinstance(value, list) else value


def to_strings(value: Any) -> Any:
    """The same, and make a tuple of a string."""
    return (value,) if isinstance(value, str) else to_tuple(value)
