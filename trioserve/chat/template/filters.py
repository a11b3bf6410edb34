"""Filters, functions and methods of chat templates: those of our own, and how large results get."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import markupsafe
from jinja2.sandbox import safe_range

from trioserve.errors import TemplateError

if TYPE_CHECKING:
    from trioserve.chat.template.sandbox import Meter

#: Integers that a template computes stay below this: larger ones can make dictionaries slow.
MAX_INT = 2**63

#: The size of an empty value that is not text.
SCALAR = 32


def require(condition: bool, problem: str) -> None:
    """Raise `TemplateError` unless a condition holds. The template is what has the problem."""
    if not condition:
        raise TemplateError(f"The chat template {problem}.")


# -- how large the results of filters and methods get at most, where that is not their input's size


def _size_of_replace(_meter: Meter, text: Any, old: Any, new: Any, count: Any = None) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


def _size_of_aligned(
    _meter: Meter, text: Any, width: Any = 80, first: Any = None, blank: Any = None
) -> int:
    """Bound the result of filters that add to a text, or to each of its lines or tabs."""
    places = 2 + len(str(text).splitlines()) + str(text).count("\t")
    return len(str(text)) + places * (len(width) if isinstance(width, str) else int(width))


def _size_of_join(meter: Meter, parts: Any, d: Any = "", attribute: Any = None) -> int:
    n_parts = len(parts) if hasattr(parts, "__len__") else 0
    return meter.measure(parts)[0] + len(str(d)) * n_parts


def size_of_percent(meter: Meter, pattern: str, values: Any) -> int:
    """Bound the result of ``%``."""
    require(len(pattern) <= 10_000, "formats with too long a pattern")
    for found in re.finditer(r"%(?:\([^()]*+(\)|\(|\Z))?([#0 +.\d*-]*+)", pattern):
        require(found[1] in (None, ")"), "formats by a name with parentheses")
        require(not re.search(r"\*|\d{5}", found[2]), "formats with too large a width")
    return len(pattern) + pattern.count("%") * (10_000 + meter.measure(values)[0])


def _size_of_round(_meter: Meter, _value: Any, precision: Any = 0, method: Any = None) -> int:
    require(-30 <= precision <= 30, "rounds to too many digits")
    return 0


def _size_of_sum(_meter: Meter, _value: Any, attribute: Any = None, start: Any = 0) -> int:
    require(isinstance(start, int | float), "sums what are not numbers")
    return 0


SIZES: dict[str, Callable[..., int]] = {
    "center": _size_of_aligned,
    "format": lambda meter, pattern, *args, **kwargs: size_of_percent(
        meter, str(pattern), kwargs or args
    ),
    "indent": _size_of_aligned,
    "join": _size_of_join,
    "replace": _size_of_replace,
    "round": _size_of_round,
    "sum": _size_of_sum,
}
METHOD_SIZES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _size_of_aligned),
    "expandtabs": lambda meter, text, tabsize=8: _size_of_aligned(meter, text, tabsize),
    "join": lambda meter, separator, parts: _size_of_join(meter, parts, separator),
    "replace": _size_of_replace,
}


# -- filters and functions of our own


def size_of_json(
    meter: Meter, value: Any, _ascii: Any = 0, indent: Any = None, separators: Any = None, **_: Any
) -> int:
    """Bound the blanks in JSON; the meter counts the rest."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    widest = max(width, len("".join(separators or ())))
    require(widest <= 16, "writes JSON with too wide an indent or separator")
    size, levels = meter.measure(value)
    return size // SCALAR * width * levels


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON: as `json.dumps` does, without HTML's escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def from_json(text: str) -> Any:
    """Read JSON."""
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
    value = int(digits[:30])
    require(-MAX_INT < value < MAX_INT, "computes too large a number")
    return value


def escape(value: Any) -> str:
    """Escape HTML."""
    return str(markupsafe.escape(str(value)))


def range_of(*bounds: int) -> range:
    """Make a range, as `range` does."""
    require(all(-MAX_INT < bound < MAX_INT for bound in bounds), "counts too far")
    return safe_range(*bounds)


def raise_exception(message: Any = "") -> NoReturn:
    """Refuse the messages."""
    raise TemplateError(f"The chat template refuses the messages: {str(message)[:500]}")


def strftime(now: datetime.datetime, form: str) -> str:
    """Write a time."""
    unusual = len(form) > 256 or re.search(r"%[^a-zA-Z%]*\d", form)
    require(not unusual, "asks for a date in an unusual format")
    return now.strftime(form)
