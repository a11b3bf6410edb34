"""The environment that chat templates run in: jinja2's immutable sandbox with a meter.

It differs from the one that models are trained with (that of Hugging Face's transformers) where
an untrusted template could do harm, and in three kinds: text is never marked as safe HTML, as
nothing here is HTML; filters that give an iterator give a list; and what chat templates have no
use for (``include``, ``lipsum``, ``urlize``, …) is missing. It has in addition the filter
``from_json``, and an empty list may grow by plain values.
"""

from __future__ import annotations

import datetime
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace as JinjaNamespace

from trioserve.chat.template.budget import MAX_INT, Growable, current
from trioserve.chat.template.filters import (
    check_keys,
    plan_percent,
    table_of_filters,
    table_of_tests,
)
from trioserve.errors import TemplateError

# fmt: off
_STR = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format",
    "format_map", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
    "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
    "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
))
# fmt: on
_SAFE_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: _STR,
    list: frozenset({"copy", "count", "index"}),
    Growable: frozenset({"append", "copy", "count", "index", "pop"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    range: frozenset({"count", "index", "start", "stop", "step"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
    Macro: frozenset({"name", "arguments", "caller", "catch_kwargs", "catch_varargs"}),
}


class Namespace(JinjaNamespace):
    """``namespace()``, which prints as nothing but its name: it may hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class GenerationTag(Extension):
    """``{% generation %}``, which marks the assistant's turns for training: its body stays."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Give the body of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. What it does is paid for with the meter that `budget.current` gives."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            finalize=_finalize,
            optimized=False,  # folding constants would run them while nothing is metered
            autoescape=False,
        )
        self.filters.clear()
        self.filters.update(table_of_filters())
        self.tests.clear()
        self.tests.update(table_of_tests())
        self.globals = {
            "range": _range,
            "dict": _make_dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: _strftime(now(), form),
        }

    # -- called by the rewritten template, see `rewrite`

    def tick(self, *item: object) -> bool:
        """Pay for one pass of a loop."""
        meter = current()
        meter.work(2)
        if item:
            meter.item = item[0]
        return True

    def text(self, size: int) -> None:
        """Pay for text of the template's own."""
        current().made(size)

    def admit(self, value: Any) -> Any:
        """Pay for a new value."""
        if isinstance(value, dict):
            check_keys(value)
        return current().admit(value)

    def sliced(self, value: Any) -> Any:
        """Pay for a slice. It is no larger than what it was cut from."""
        if isinstance(value, str):
            return current().admit(value)
        current().made(64 + 8 * len(value))
        return value

    def growable(self) -> Growable:
        """Make the value of ``[]``."""
        current().made(64)
        return Growable()

    def read(self, value: Any) -> Any:
        """Pay for reading a value."""
        current().look(value)
        return value

    def tilde(self, *values: Any) -> str:
        """Do what ``~`` does."""
        meter = current()
        meter.plan(sum(meter.weigh(value) for value in values))
        text: str = meter.admit("".join([str(value) for value in values]))
        return text

    # -- what jinja2 calls

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do an operator, if its result is small enough."""
        meter = current()
        if operator == "+":
            meter.plan(meter.weigh(left) + meter.weigh(right))
        elif operator == "*":
            _plan_product(left, right)
        elif operator == "**":
            if not isinstance(left, float) and not isinstance(right, float) and right > 64:
                raise TemplateError("The chat template computes too large a number.")
        elif operator == "%" and isinstance(left, str):
            plan_percent(left, right)
        return meter.admit(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow what is listed; `value` plays no part."""
        if attr.startswith("_"):
            return False
        allowed = _SAFE_ATTRIBUTES.get(type(obj))
        if allowed is not None:
            return attr in allowed
        return isinstance(obj, Namespace | LoopContext | BlockReference)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up a key, an index or an attribute."""
        if type(argument) is not str and type(argument) is not int:
            current().look(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give a bounded ``str.format`` in place of the real one."""
        if not isinstance(value, types.BuiltinMethodType):
            return None
        if value.__name__ not in ("format", "format_map") or type(value.__self__) is not str:
            return None
        pattern: str = value.__self__
        if value.__name__ == "format_map":
            return lambda mapping: _BoundedFormatter(self).vformat(pattern, (), mapping)
        return lambda *args, **kwargs: _BoundedFormatter(self).vformat(pattern, args, kwargs)

    def call(  # the names leave room for arguments of any other name
        __self,  # noqa: N805
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a function, a macro or a method."""
        if type(__obj) is types.MethodType and __obj.__self__ is __self:
            return __obj(*args)  # one of our own, put in by `rewrite`
        # Since 3.1.6 jinja2 has done this at every access; before, only our call would.
        __obj = __self.wrap_str_format(__obj) or __obj
        meter = current()
        meter.work(4)
        owner = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        if not isinstance(__obj, Macro | LoopContext):  # these only pass their arguments on
            for argument in (*args, *kwargs.values()):
                meter.look(argument)
        if isinstance(owner, str):
            meter.look(owner)
            if name in _PLANS:
                meter.plan(_PLANS[name](owner, *args, **kwargs))
        elif isinstance(owner, list | tuple | range) and name in ("count", "index"):
            meter.work(len(owner))
            meter.look(owner)
        result = ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)
        if result is owner or (isinstance(owner, dict) and name == "get"):
            return result  # nothing new
        return meter.admit(result)


class _BoundedFormatter(SandboxedFormatter):
    """``str.format`` that stops when its result is too long."""

    _size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5}", format_spec):
            raise TemplateError("The chat template formats with too large a width.")
        meter = current()
        meter.look(value)
        text = super().format_field(value, format_spec)
        self._size += len(text)
        meter.plan(self._size)
        return text

    def check_unused_args(
        self, used_args: set[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Arguments that a pattern does not use are fine, as in ``str.format``."""


def _finalize(value: Any) -> str:
    """Turn what ``{{ … }}`` prints into text."""
    meter = current()
    if type(value) is not str:
        meter.weigh(value)
        value = str(value)
    meter.made(len(value))
    text: str = value
    return text


def _plan_product(left: Any, right: Any) -> None:
    if isinstance(right, str | list | tuple):
        left, right = right, left
    if not isinstance(left, str | list | tuple) or not isinstance(right, int):
        return
    meter = current()
    size = len(left) if isinstance(left, str) else meter.weigh(left)
    meter.plan(size * max(right, 0))


def _plan_width(owner: str, width: Any, *_fill: Any) -> int:
    return len(owner) + max(int(width), 0)


def _plan_tabs(owner: str, tabsize: Any = 8) -> int:
    return len(owner) + owner.count("\t") * max(int(tabsize), 0)


def _plan_replace(owner: str, old: Any, new: Any, *_count: Any, **_kwargs: Any) -> int:
    return len(owner) + owner.count(old) * len(new)


def _plan_join(owner: str, parts: Any) -> int:
    return current().weigh(parts) + len(owner) * len(parts)


#: How long the results of those methods of strings are whose length is not that of their input.
_PLANS: dict[str, Callable[..., int]] = {
    "center": _plan_width,
    "ljust": _plan_width,
    "rjust": _plan_width,
    "zfill": _plan_width,
    "expandtabs": _plan_tabs,
    "replace": _plan_replace,
    "join": _plan_join,
}


def _range(*bounds: int) -> range:
    for bound in bounds:
        if not -MAX_INT < bound < MAX_INT:
            raise TemplateError("The chat template counts too far.")
    return safe_range(*bounds)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*args, **kwargs)
    check_keys(made)
    return made


def _raise_exception(message: Any = "") -> NoReturn:
    raise TemplateError(f"The chat template refuses the messages: {str(message)[:500]}")


def _strftime(now: datetime.datetime, form: str) -> str:
    if len(form) > 256 or re.search(r"%[^a-zA-Z%]*\d", form):
        raise TemplateError("The chat template asks for a date in an unusual format.")
    return now.strftime(form)
