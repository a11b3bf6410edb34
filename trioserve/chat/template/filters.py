"""The filters and tests of chat templates: jinja2's, each paid for and bounded, and a few more."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

from jinja2 import pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS
from jinja2.utils import _PassArg

from trioserve.chat.template.budget import MAX_INT, current
from trioserve.chat.template.rewrite import ADMIT_FILTER
from trioserve.errors import TemplateError

# fmt: off
_FROM_JINJA = (
    "abs", "attr", "capitalize", "center", "count", "d", "default", "dictsort", "first",
    "float", "format", "indent", "int", "items", "join", "last", "length", "list", "lower",
    "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "select",
    "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper", "urlencode",
    "wordcount",
)
# fmt: on

#: Filters that take the same time for every value, and give a part of it, or a number.
_QUICK = frozenset({"attr", "count", "d", "default", "first", "last", "length"})

#: Filters that take time only for what they give, which is paid for there.
_LAZY = frozenset(
    {"items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}
)

#: Filters that do more for each character than to look at it.
_SLOW = frozenset({"title", "urlencode", "wordcount"})

#: Tests that read all of their value.
# fmt: off
_READING_TESTS = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
    "lessthan", "lt", "ne", "lower", "upper",
)
# fmt: on


def table_of_filters() -> dict[str, Callable[..., Any]]:
    """Give the filters by name."""
    table = {name: _bounded(FILTERS[name], name) for name in _FROM_JINJA}
    ours: dict[str, Callable[..., Any]] = {
        "tojson": to_json,
        "from_json": from_json,
        "safe": str,
        "e": _escape,
        "escape": _escape,
        "sum": _sum,
        ADMIT_FILTER: _check,
    }
    return table | {name: _bounded(filter_, name) for name, filter_ in ours.items()}


def table_of_tests() -> dict[str, Callable[..., Any]]:
    """Give the tests by name."""
    table: dict[str, Any] = {**TESTS}
    return table | {name: _read(table[name]) for name in _READING_TESTS}


def _bounded(filter_: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a filter, so that its input is paid for and its result checked.

    It asks for the context even if the filter does not, as jinja2 would otherwise run it on
    constants while the template is compiled.
    """
    wants = _PassArg.from_obj(filter_)
    plan = _PLANS.get(name)
    text_price, other_price = (4, 4) if name in _SLOW else (512, 24)
    quick, lazy = name in _QUICK, name in _LAZY

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = current()
        value = meter.gather(value) if hasattr(value, "__next__") else value
        size = 0 if quick or lazy else meter.weigh(value)
        meter.work(2 + size // (text_price if isinstance(value, str) else other_price))
        for argument in (*args, *kwargs.values()):
            meter.look(argument)
        if plan is not None:
            meter.plan(plan(value, *args, **kwargs))
        first = {
            _PassArg.context: (context,),
            _PassArg.eval_context: (context.eval_ctx,),
            _PassArg.environment: (context.environment,),
            None: (),
        }[wants]
        result = filter_(*first, value, *args, **kwargs)
        return result if quick or result is value else meter.admit(result)

    return run


def _read(test: Callable[..., bool]) -> Callable[..., bool]:
    def run(value: Any, *args: Any) -> bool:
        meter = current()
        for operand in (value, *args):
            meter.look(operand)
        return test(value, *args)

    return run


# -- bounds: each gives how long the result of a filter gets at most


def _plan_width(value: Any, width: Any = 80) -> int:
    return len(str(value)) + max(int(width), 0)


def _plan_indent(value: Any, width: Any = 4, *_args: Any, **_kwargs: Any) -> int:
    indent = len(width) if isinstance(width, str) else max(int(width), 0)
    lines = len(str(value).splitlines()) + 1
    return len(str(value)) + lines * indent


def _plan_join(value: Any, d: Any = "", attribute: Any = None) -> int:
    count = len(value) if hasattr(value, "__len__") else 0
    return current().weigh(value) + count * current().weigh(d)


def _plan_replace(value: Any, old: Any, new: Any, count: Any = None) -> int:
    return len(str(value)) + str(value).count(str(old)) * len(str(new))


def _plan_round(value: Any, precision: Any = 0, *_method: Any, **_kwargs: Any) -> int:
    if not -30 <= precision <= 30:
        raise TemplateError("The chat template rounds to too many digits.")
    return 0


def _plan_format(value: Any, *args: Any, **kwargs: Any) -> int:
    return plan_percent(str(value), kwargs or args)


_PLANS: dict[str, Callable[..., int]] = {
    "center": _plan_width,
    "format": _plan_format,
    "indent": _plan_indent,
    "join": _plan_join,
    "replace": _plan_replace,
    "round": _plan_round,
}

_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\-+ ]*(\*|\d*)(?:\.(\*|\d*))?")


def plan_percent(pattern: str, values: Any) -> int:
    """Bound the length of ``pattern % values``.

    Raises:
        TemplateError: it may be longer than a value may be.
    """
    meter = current()
    size = meter.weigh(values)
    total = len(pattern) + size
    for found in _CONVERSION.finditer(pattern):
        meter.work()
        for number in found.groups(default=""):
            if number == "*" or len(number) > 4:
                raise TemplateError("The chat template formats with too large a width.")
            total += int(number or 0)
        if isinstance(values, dict):
            total += size
    meter.plan(total)
    return total


def check_keys(value: dict[Any, Any]) -> None:
    """Refuse keys whose hash is slow, or could be made to collide."""
    for key in value:
        if not (key is None or isinstance(key, str | int | float)):
            raise TemplateError("The chat template uses a key that is not a plain value.")


# -- filters of our own


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON: as `json.dumps` does, without HTML's escapes."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 16:
        raise TemplateError("The chat template indents JSON too far.")
    if separators is not None and sum(len(separator) for separator in separators) > 16:
        raise TemplateError("The chat template separates JSON by too long a text.")
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators and (separators[0], separators[1]),
        sort_keys=bool(sort_keys),
    )
    if indent is None:
        return encoder.encode(value)
    meter = current()
    pieces, size = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        meter.plan(size)
        meter.work()
    return "".join(pieces)


def from_json(text: str) -> Any:
    """Read JSON."""
    return json.loads(text, parse_int=_small_int)


def _small_int(digits: str) -> int:
    value = int(digits) if len(digits) < 30 else MAX_INT
    if not -MAX_INT < value < MAX_INT:
        raise TemplateError("The chat template reads too large a number.")
    return value


def _check(text: str) -> str:
    current().plan(len(text))
    return text


def _escape(value: Any) -> str:
    return html.escape(str(value)).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")


def _sum(value: Any, attribute: str | None = None, start: Any = 0) -> Any:
    items = value if attribute is None else [item[attribute] for item in value]
    if not all(isinstance(item, int | float) for item in [*items, start]):
        raise TemplateError("The chat template sums what are not numbers.")
    return sum(items, start)
