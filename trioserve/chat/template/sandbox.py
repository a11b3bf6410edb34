"""The environment that chat templates run in: jinja2's immutable sandbox with bounds.

It differs from the one that models are trained with (that of Hugging Face's transformers) where
an untrusted template could do harm, and in three kinds: text is never marked as safe HTML, as
nothing here is HTML; filters that give an iterator give a list; and what chat templates have no
use for (``include``, ``lipsum``, ``urlize``, …) is missing. It has in addition the filter
``from_json``, and an empty list may grow by plain values.

A limit on the time alone would not do. Nothing in Python interrupts a single step, and ``'a' *
10**9``, ``9**9**9`` or ``'%999999999d' % 1`` is one that takes all memory, or for ever. So the
size of what each operator, filter and method makes is bounded before it runs; that is most of
this module. jinja2 lets a sandbox step in at calls, attributes and operators. Loops, slices,
literals, comparisons, ``~`` and captured text would run as plain Python, so a code generator of
our own sends them through the `budget`.
"""

# ruff: noqa: N802, N815 (jinja2's visitors have methods with the names of classes)

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace as JinjaNamespace, _PassArg
from markupsafe import escape

from trioserve.chat.template.budget import MAX_INT, SCALAR, GrowingList, Output, current, require
from trioserve.errors import TemplateError

#: What templates may use of each type. Of strings not what makes bytes, or any amount of text.
_SAFE_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(dir(str)) - {"encode", "maketrans", "translate"},
    list: frozenset({"copy", "count", "index"}),
    GrowingList: frozenset({"append", "copy", "count", "index", "pop"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    range: frozenset({"count", "index", "start", "stop", "step"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
    Macro: frozenset({"name", "arguments", "caller", "catch_kwargs", "catch_varargs"}),
}
# fmt: off
#: Filters of jinja2 that take no time to speak of, and make nothing.
_QUICK_FILTERS = ("attr", "count", "d", "default", "first", "last", "length")
_FILTERS = (
    "abs", "capitalize", "center", "dictsort", "float", "format", "indent", "int", "items", "join",
    "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round",
    "select", "selectattr", "sort", "string", "sum", "title", "trim", "truncate", "unique",
    "upper", "urlencode", "wordcount",
)
# fmt: on
#: Tests that read all of a value.
_READING_TESTS = {"in", "lower", "upper"} | {
    name for name, test in TESTS.items() if test.__module__ == "_operator"
}
_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Extends: "extends",
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from … import",
    nodes.ScopedEvalContextModifier: "autoescape",
    nodes.EvalContextModifier: "autoescape",
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


def _through(
    method: str, visit: Callable[..., None], applies: Callable[[Any], bool] = lambda _: True
) -> Any:
    """Generate the code of a node as jinja2 does, but send its value through the meter."""

    def generate(self: CodeGenerator, node: nodes.Node, frame: Frame) -> None:
        metered = applies(node)
        self.write(f"environment.meter().{method}(" if metered else "")
        visit(self, node, frame)
        self.write(")" if metered else "")

    return generate


def _reads_long_values(node: nodes.Compare) -> bool:
    sides = (node.expr, node.ops[0].expr)
    constant = any(isinstance(side, nodes.Const) for side in sides)
    return len(node.ops) > 1 or node.ops[0].op not in ("eq", "ne") or not constant


class _MeteredCode(CodeGenerator):
    """Meters the operations that jinja2's sandbox does not intercept."""

    visit_List = _through("admit_list", CodeGenerator.visit_List)
    visit_Dict = _through("admit", CodeGenerator.visit_Dict)
    visit_Tuple = _through("admit", CodeGenerator.visit_Tuple, lambda node: node.ctx == "load")
    visit_Getitem = _through(
        "admit_slice", CodeGenerator.visit_Getitem, lambda node: isinstance(node.arg, nodes.Slice)
    )
    visit_Compare = _through("step", CodeGenerator.visit_Compare, _reads_long_values)
    visit_MarkSafe = _through("step", lambda self, node, frame: self.visit(node.expr, frame))

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        item: nodes.Expr = nodes.Const(None)
        if isinstance(node.target, nodes.Name):
            item = nodes.Name(node.target.name, "load")
        # No template has this node, so that it can stand for a step.
        node.body.insert(0, nodes.ExprStmt(nodes.MarkSafe(item), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(nodes.MarkSafe(nodes.Const(True)), node.test)
        self.writeline("environment.meter().enter_loop()")
        super().visit_For(node, frame)
        self.writeline("environment.meter().leave_loop()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.meter().join(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.output()")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that a template is compiled in. `now` is what ``strftime_now`` goes by."""

    code_generator_class = _MeteredCode
    meter = staticmethod(current)
    output = Output
    intercepted_binops = frozenset({"+", "-", "*", "%", "**"})

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            optimized=False,  # constants would be folded while nothing is counted
            autoescape=False,
        )
        self.filters = {name: FILTERS[name] for name in _QUICK_FILTERS}
        self.filters |= {name: _bounded(FILTERS[name], _SIZES.get(name)) for name in _FILTERS}
        self.filters |= {"safe": str, "e": _bounded(_escape), "escape": _bounded(_escape)}
        self.filters |= {"tojson": _bounded(_to_json), "from_json": _bounded(_from_json)}
        self.tests = TESTS | {name: _bounded(TESTS[name]) for name in _READING_TESTS}
        self.globals = {
            "range": _range,
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: _strftime(now(), form),
        }

    def compile_template(self, source: str) -> tuple[Template, frozenset[str]]:
        """Compile a template; gives the names of the variables that it takes with it.

        Raises:
            TemplateSyntaxError: it is wrong, or uses what chat templates have no use for.
        """
        tree = self.parse(source)
        for node in tree.find_all(tuple(_REFUSED)):
            raise TemplateSyntaxError(
                f"'{_REFUSED[type(node)]}' is not supported in chat templates", node.lineno
            )
        wants = frozenset(find_undeclared_variables(tree))
        return Template.from_code(self, self.compile(tree), self.make_globals(None)), wants

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do an operator, if its result is small enough."""
        meter = current()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    meter.check_size((meter.measure(value)[0] - SCALAR) * times)
        elif operator == "**":
            small = isinstance(left, float) or isinstance(right, float) or right <= 64
            require(small, "computes too large a number")
        elif operator == "%" and isinstance(left, str):
            meter.check_size(_size_of_percent(left, right))
        return meter.admit(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow the listed names; `value` does not matter."""
        if attr.startswith("_"):
            return False
        allowed = _SAFE_ATTRIBUTES.get(type(obj))
        if allowed is not None:
            return attr in allowed
        return isinstance(obj, Namespace | LoopContext | BlockReference)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up a key, an index or an attribute."""
        if type(argument) is tuple:
            current().tick()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give a bounded ``str.format`` in place of the real one."""
        name, pattern = getattr(value, "__name__", ""), getattr(value, "__self__", None)
        if not isinstance(pattern, str) or name not in ("format", "format_map"):
            return None
        if name == "format_map":
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
        # Since 3.1.6 jinja2 has done this at every access; before, only our call would.
        __obj = __self.wrap_str_format(__obj) or __obj
        meter = current()
        meter.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ in _METHOD_SIZES:
            given = {name: kwargs[name] for name in kwargs if name not in _OF_JINJA}
            meter.check_size(_METHOD_SIZES[__obj.__name__](owner, *args, **given))
        return meter.admit(super().call(__context, __obj, *args, **kwargs))


class _BoundedFormatter(SandboxedFormatter):
    """``str.format`` that stops when its result is too long."""

    _size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        require(not re.search(r"\d{5}", format_spec), "formats with too large a width")
        text = super().format_field(value, format_spec)
        self._size += len(text)
        current().check_size(self._size)
        return text


def _bounded(function: Any, size_of: Callable[..., int] | None = None) -> Callable[..., Any]:
    """Wrap a filter or a test, so that the size of its result is checked.

    jinja2 does not run it on constants while it compiles, for there is no meter then.
    """
    n_own = 0 if _PassArg.from_obj(function) is None else 1  # jinja2's argument comes first

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = current()
        meter.tick()
        if size_of is not None:
            meter.check_size(size_of(*args[n_own:], **kwargs))
        return meter.admit(function(*args, **kwargs))

    return run


#: Arguments that compiled templates add to calls, and jinja2 takes away again.
_OF_JINJA = ("_loop_vars", "_block_vars")

# -- how large the results of filters and methods get at most, where that is not their input's size


def _size_of_replace(text: Any, old: Any, new: Any, count: Any = None) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


def _size_of_aligned(text: Any, width: Any = 80, first: Any = None, blank: Any = None) -> int:
    """Bound the result of filters that add to a text, or to each of its lines or tabs."""
    places = 2 + len(str(text).splitlines()) + str(text).count("\t")
    return len(str(text)) + places * (len(width) if isinstance(width, str) else int(width))


def _size_of_join(parts: Any, d: Any = "", attribute: Any = None) -> int:
    n_parts = len(parts) if hasattr(parts, "__len__") else 0
    return current().measure(parts)[0] + len(str(d)) * n_parts


def _size_of_percent(pattern: str, values: Any) -> int:
    require(len(pattern) <= 10_000, "formats with too long a pattern")
    for found in re.finditer(r"%(?:\([^()]*+(\)|\(|\Z))?([#0 +.\d*-]*+)", pattern):
        require(found[1] in (None, ")"), "formats by a name with parentheses")
        require(not re.search(r"\*|\d{5}", found[2]), "formats with too large a width")
    return len(pattern) + pattern.count("%") * (10_000 + current().measure(values)[0])


def _size_of_round(_value: Any, precision: Any = 0, method: Any = None) -> int:
    require(-30 <= precision <= 30, "rounds to too many digits")
    return 0


def _size_of_sum(_value: Any, attribute: Any = None, start: Any = 0) -> int:
    require(isinstance(start, int | float), "sums what are not numbers")
    return 0


_SIZES: dict[str, Callable[..., int]] = {
    "center": _size_of_aligned,
    "format": lambda pattern, *args, **kwargs: _size_of_percent(str(pattern), kwargs or args),
    "indent": _size_of_aligned,
    "join": _size_of_join,
    "replace": _size_of_replace,
    "round": _size_of_round,
    "sum": _size_of_sum,
}
_METHOD_SIZES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _size_of_aligned),
    "expandtabs": lambda text, tabsize=8: _size_of_aligned(text, tabsize),
    "join": lambda separator, parts: _size_of_join(parts, separator),
    "replace": _size_of_replace,
}


# -- filters and functions of our own


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON: as `json.dumps` does, without HTML's escapes."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    widest = max(width, len("".join(separators or ())))
    require(widest <= 16, "writes JSON with too wide an indent or separator")
    size, levels = current().measure(value)
    current().check_size(size // SCALAR * width * levels)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _from_json(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: current().admit(int(digits[:30])))


def _escape(value: Any) -> str:
    return str(escape(str(value)))


def _range(*bounds: int) -> range:
    require(all(-MAX_INT < bound < MAX_INT for bound in bounds), "counts too far")
    return safe_range(*bounds)


def _raise_exception(message: Any = "") -> NoReturn:
    raise TemplateError(f"The chat template refuses the messages: {str(message)[:500]}")


def _strftime(now: datetime.datetime, form: str) -> str:
    unusual = len(form) > 256 or re.search(r"%[^a-zA-Z%]*\d", form)
    require(not unusual, "asks for a date in an unusual format")
    return now.strftime(form)
