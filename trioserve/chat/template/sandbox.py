"""The sandbox that chat templates run in: jinja2's immutable one, with a budget.

The template of a GGUF is untrusted, and Python cannot kill a thread: a template has to be stopped
from inside. So the clock is read where a template repeats something, and what it makes is added
up. A step between two looks at the clock is short, because no value is larger than `Limits.value`.
The size of a value is that of what it prints: a list that holds one text a thousand times counts
it a thousand times. Otherwise sixty lists, each of the one before twice, would print for years.

A limit on the time alone would not do. Nothing in Python interrupts a single step, and ``'a' *
10**9``, ``9**9**9`` or ``'%999999999d' % 1`` is one that takes all memory, or for ever. So the
size of what each operator, filter and method makes is bounded before it runs (see `filters`).
jinja2 lets a sandbox step in at calls, attributes and operators. Loops, slices, literals,
comparisons, ``~`` and captured text would run as plain Python, so a code generator of our own
sends them through the `Meter`.

The environment differs from the one that models are trained with (that of Hugging Face's
transformers) where an untrusted template could do harm, and in three kinds: text is never marked
as safe HTML, as nothing here is HTML; filters that give an iterator give a list; and what chat
templates have no use for (``include``, ``lipsum``, ``urlize``, …) is missing. It has in addition
the filter ``from_json``, and an empty list may grow by plain values.
"""

# ruff: noqa: N802, N815 (jinja2's visitors have methods with the names of classes)

from __future__ import annotations

import datetime
import functools
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

import attrs
from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Namespace as JinjaNamespace, _PassArg

from trioserve.chat.template import filters
from trioserve.chat.template.filters import MAX_INT, SCALAR, require
from trioserve.errors import TemplateError

MIB = 1 << 20

#: The deepest values; those of a request are a little flatter, so that templates can wrap them.
MAX_DEPTH = 100
MAX_INPUT_DEPTH = 90

#: Integers in a request stay below this, which is more than JSON Schemas use as limits.
MAX_INPUT_INT = 2**70

#: Seconds between two calls of `Limits.check`.
_CHECK_SECONDS = 0.02

_CONTAINERS = (list, tuple, dict)
_ITERATORS = (Iterator, KeysView, ValuesView, ItemsView)


@attrs.frozen
class Limits:
    """Bounds on one render of a small input. Sizes are in bytes, roughly."""

    value: int = 4 * MIB  # the largest value, and the longest output
    made: int = 128 * MIB  # the sum of the values that are made
    seconds: float = 2.0  # of processor time
    hurried: bool = False  # whether `OutOfTimeError` says that it took longer
    check: Callable[[], object] = lambda: None  # called now and then; what it raises ends it


class OutOfTimeError(Exception):
    """A render has used up its time, and its limits are such that it may be tried again."""


class GrowingList(list[Any]):
    """The value of ``[]`` in a template: a list that may grow by plain values.

    The sandbox keeps lists immutable, but some models' templates use one as a queue. Its size
    counts the room that it may grow by, so that the sizes of lists around it stay right.
    """

    ROOM = 64 * 1024

    def __init__(self) -> None:
        super().__init__()
        self._room = self.ROOM

    def append(self, value: Any) -> None:
        """Add one plain value; containers are refused, for they could hold this list."""
        require(
            value is None or isinstance(value, str | int | float),
            "may append only plain values to a list",
        )
        self._room -= SCALAR + (2 * len(value) if isinstance(value, str) else 16)
        require(self._room >= 0, "appends too much to a list")
        super().append(value)


class Meter:
    """Counts the cost of one render. Every method raises `TemplateError` if it is too high.

    Args:
        limits: the bounds for a small input.
        given: the variables of the template, which must be plain JSON.
        places: by the id of each message, its place in the request.
    """

    def __init__(self, limits: Limits, given: Mapping[str, Any], places: Mapping[int, int]) -> None:
        self.place: int | None = None  # of the message that the template is looping over
        self._places = places
        self._outer: list[int | None] = []
        # By the id of a container: its size and depth, and itself, so that the id stays its own.
        self._known: dict[int, tuple[int, int, object]] = {}
        self._reads_input = True
        self.max_value = sys.maxsize
        size = self.measure(given)[0]
        self._reads_input = False
        self.max_value = limits.value + 4 * size
        # Some templates put a long conversation together by adding to a text, message by message.
        # All those texts count as made, though hardly any lives on: hence the generous factor.
        self._max_made = limits.made + max(32 * size, min(512 * size, 512 * MIB))
        self._made = 0
        self._seconds = limits.seconds + size / 8e6
        self._began = time.thread_time()
        self._look_again = time.monotonic() + min(self._seconds, _CHECK_SECONDS)
        self._check = limits.check

    def tick(self) -> None:
        """Look at the clock. Time that other threads take does not count."""
        if time.monotonic() < self._look_again:
            return
        self._check()
        left = self._seconds - (time.thread_time() - self._began)
        if left <= 0:
            raise OutOfTimeError("does too much work")
        self._look_again = time.monotonic() + min(left, _CHECK_SECONDS)

    def check_size(self, size: int) -> None:
        if size > self.max_value:
            raise TemplateError(
                f"The chat template makes a value of more than {self.max_value} bytes."
            )

    def made(self, size: int) -> None:
        """Count a value, or a copy of one, of this size."""
        self._made += size
        if self._made > self._max_made:
            raise TemplateError(
                f"The chat template makes more than {self._max_made} bytes of values."
            )

    def measure(self, value: Any, depth: int = 0) -> tuple[int, int]:
        """Give the size of a value and how many levels it has, and check both."""
        if isinstance(value, str):
            return SCALAR + len(value), 0
        if value is None or isinstance(value, bool):
            return SCALAR, 0
        if self._reads_input:
            _check_is_json(value)
        if isinstance(value, range):
            return SCALAR * (1 + len(value)), 1
        if not isinstance(value, _CONTAINERS):
            return SCALAR, 0
        if (known := self._known.get(id(value))) is not None:
            return known[0], known[1]
        children = [*value, *value.values()] if isinstance(value, dict) else value
        size, levels = 64 + (GrowingList.ROOM if isinstance(value, GrowingList) else 0), 0
        max_depth = MAX_INPUT_DEPTH if self._reads_input else MAX_DEPTH
        for child in children if depth < max_depth else ():
            if isinstance(child, str):  # most are, and this saves a call
                size += SCALAR + len(child)
                continue
            child_size, child_levels = self.measure(child, depth + 1)
            size += child_size
            if child_levels > levels:
                levels = child_levels
        if depth + levels >= max_depth:
            raise TemplateError("A value is nested too deeply.")
        if size > self.max_value:
            self.check_size(size)
        self._known[id(value)] = size, levels + 1, value
        return size, levels + 1

    # -- what the code of a template goes through

    def admit(self, value: Any) -> Any:
        """Check and count the result of an operation; gives it back, iterators as lists."""
        if time.monotonic() >= self._look_again:
            self.tick()
        kind = type(value)
        if kind is str:
            size = SCALAR + len(value)
            if size > self.max_value:
                self.check_size(size)
            self.made(size)
        elif kind is bool or kind is range or value is None:
            pass  # always small
        elif kind is int:
            require(-MAX_INT < value < MAX_INT, "computes too large a number")
        elif isinstance(value, _CONTAINERS):
            self.made(64 + SCALAR * len(value))
            self.measure(value)
        elif isinstance(value, _ITERATORS):
            return self.admit(list(value))
        return value

    def admit_list(self, value: list[Any]) -> list[Any]:
        """Check and count a list that is written out; an empty one may grow."""
        admitted: list[Any] = self.admit(value) if value else GrowingList()
        return admitted

    def admit_slice(self, value: Any) -> Any:
        """Count a slice. It is no larger than the value that it is cut from."""
        self.tick()
        self.made(64 + len(value) * (1 if isinstance(value, str) else 8))
        return value

    def join(self, *values: Any) -> Any:
        """Evaluate ``~``, within the limits."""
        self.check_size(sum(self.measure(value)[0] for value in values))
        return self.admit("".join(map(str, values)))

    def enter_loop(self) -> None:
        """Remember which message the loop around this one is at."""
        self._outer.append(self.place)

    def step(self, value: Any) -> Any:
        """Look at the clock, and note which message a loop is at."""
        if time.monotonic() >= self._look_again:
            self.tick()
        self.place = self._places.get(id(value), self.place)
        return value

    def leave_loop(self) -> None:
        self.place = self._outer.pop()


class Output(list[str]):
    """Pieces of text, counted as they come: what a template prints, or captures."""

    def __init__(self) -> None:
        super().__init__()
        self._meter = current()
        self._size = 0

    def append(self, piece: str) -> None:
        self._size += len(piece)
        if self._size > self._meter.max_value:
            self._meter.check_size(self._size)
        self._meter.made(8 + len(piece))
        super().append(piece)


def _check_is_json(value: object) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TemplateError("The keys of an object must be strings.")
    elif isinstance(value, int):
        if abs(value) >= MAX_INPUT_INT:
            raise TemplateError("A number is too large.")
    elif not (value is None or isinstance(value, float | list | tuple)):
        raise TemplateError(f"A value of type {type(value).__name__} is not JSON.")


#: The meter of the render that is running. While a template is compiled it is not set, so that
#: jinja2 fails to run filters on constants then, and leaves them for later.
running: ContextVar[Meter] = ContextVar("running")
current = running.get


# -- the environment


#: The attributes of each type for templates. Those of str that make bytes, or any amount of text,
#: are missing.
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
        sizes = filters.SIZES
        self.filters |= {name: _bounded(FILTERS[name], sizes.get(name)) for name in _FILTERS}
        self.filters |= {"safe": str, "e": _bounded(filters.escape)}
        self.filters |= {"escape": _bounded(filters.escape)}
        self.filters |= {"tojson": _bounded(filters.to_json, filters.size_of_json)}
        self.filters |= {"from_json": _bounded(filters.from_json)}
        self.tests = TESTS | {name: _bounded(TESTS[name]) for name in _READING_TESTS}
        self.globals = {
            "range": filters.range_of,
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": filters.raise_exception,
            "strftime_now": lambda form: filters.strftime(now(), form),
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
        tracker = TrackingCodeGenerator(self)
        tracker.optimizer = None  # it would fold constants within the tree
        tracker.visit(tree)
        wants = frozenset(tracker.undeclared_identifiers)
        return Template.from_code(self, self.compile(tree), self.make_globals(None)), wants

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = current()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    meter.check_size((meter.measure(value)[0] - SCALAR) * times)
        elif operator == "**":
            small = isinstance(left, float) or isinstance(right, float) or right <= 64
            require(small, "computes too large a number")
        elif operator == "%" and isinstance(left, str):
            meter.check_size(filters.size_of_percent(meter, left, right))
        return meter.admit(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        allowed = _SAFE_ATTRIBUTES.get(type(obj))
        if allowed is not None:
            return attr in allowed
        return isinstance(obj, Namespace | LoopContext | BlockReference)

    def getitem(self, obj: Any, argument: Any) -> Any:
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
        # Since 3.1.6 jinja2 has done this at every access; before, only our call would.
        __obj = __self.wrap_str_format(__obj) or __obj
        meter = current()
        meter.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ in filters.METHOD_SIZES:
            given = {name: kwargs[name] for name in kwargs if name not in _OF_JINJA}
            size_of = filters.METHOD_SIZES[__obj.__name__]
            meter.check_size(size_of(meter, owner, *args, **given))
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
    """Wrap a filter or a test, so that the size of its result is checked."""
    n_own = 0 if _PassArg.from_obj(function) is None else 1  # jinja2's argument comes first

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = current()
        meter.tick()
        if size_of is not None:
            meter.check_size(size_of(meter, *args[n_own:], **kwargs))
        return meter.admit(function(*args, **kwargs))

    return run


#: Arguments that compiled templates add to calls, and jinja2 takes away again.
_OF_JINJA = ("_loop_vars", "_block_vars")
