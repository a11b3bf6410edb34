"""What a chat template may spend: a meter for the work, the memory and the size of values.

The template of a GGUF is untrusted, so rendering is metered like a contract on a block chain:
every operation that takes more than constant time, and everything that makes a value, is paid
for before or just after it happens. Three rules make that sound:

* A value is never *larger* than `Limits.value`. Its size counts what it would print: a list that
  holds the same string a thousand times counts it a thousand times. So each single step of
  Python's, such as comparing two values or writing one as JSON, takes a bounded time.
* `Limits.made` bounds the sum of the sizes of all values made, and so the memory.
* `Limits.work` bounds the time, in units of about a microsecond. It counts operations and
  sizes, not seconds, so that a render gives the same result on a slow machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs

from trioserve.errors import TemplateError

MIB = 1 << 20

#: How deep values may be nested.
MAX_DEPTH = 100

#: Integers that a template computes stay below this: larger ones make slow dictionaries.
MAX_INT = 2**63

#: Integers in a request stay below this, which is more than JSON Schemas use as limits.
MAX_INPUT_INT = 2**70

#: The size of what is not text and holds nothing.
SCALAR = 32


@attrs.frozen
class Limits:
    """Bounds on one render. Sizes are in bytes, roughly; the work is in microseconds, roughly."""

    value: int = 4 * MIB  # the largest value, and the longest output
    made: int = 128 * MIB  # the sum of the values that are made
    work: int = 3_000_000
    seconds: float = 30.0  # a backstop; on a free machine `work` is reached long before

    def for_input(self, size: int) -> Limits:
        """Give a larger input larger bounds.

        Some templates put a long conversation together by adding to a text, message by message.
        All those texts count as made, though hardly any lives on: hence the generous factor.
        """
        return attrs.evolve(
            self,
            value=self.value + 4 * size,
            made=self.made + max(32 * size, min(512 * size, 512 * MIB)),
            work=self.work + size // 8,
        )


class Growable(list[Any]):
    """An empty list literal of a template, which may grow by plain values.

    The sandbox keeps lists immutable, but some models' templates use one as a queue. Its size
    counts the room that it may grow by, so that the sizes of lists around it stay right.
    """

    ROOM = 64 * 1024

    def __init__(self) -> None:
        super().__init__()
        self._room = self.ROOM

    def append(self, value: Any) -> None:
        """Add one plain value; containers are refused, for they could hold this list."""
        if not (value is None or isinstance(value, str | int | float)):
            raise TemplateError("The chat template may append only plain values to a list.")
        self._room -= SCALAR + (2 * len(value) if isinstance(value, str) else 16)
        if self._room < 0:
            raise TemplateError("The chat template appends too much to a list.")
        super().append(value)


class Meter:
    """Counts what one render spends. Every method raises `TemplateError` when it is too much."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.item: object = None  # the message that the template is looping over
        self._work = 0
        self._made = 0
        self._deadline = time.monotonic() + limits.seconds
        self._next_look = 1000
        # id of a container -> (size, depth, the container, kept so that the id stays its own)
        self._known: dict[int, tuple[int, int, object]] = {}

    def work(self, units: int = 1) -> None:
        """Pay for work."""
        self._work += units
        if self._work < self._next_look:
            return
        self._next_look = self._work + 1000
        if self._work > self.limits.work or time.monotonic() > self._deadline:
            raise TemplateError("The chat template does too much work.")

    def plan(self, size: int) -> None:
        """Refuse a step that would make a value of this size, before it is made."""
        if size > self.limits.value:
            raise TemplateError(
                f"The chat template makes a value of more than {self.limits.value} bytes."
            )

    def made(self, size: int) -> None:
        """Pay for a value, or a copy of one, of this size."""
        self.plan(size)
        self._made += size
        if self._made > self.limits.made:
            raise TemplateError(
                f"The chat template makes more than {self.limits.made} bytes of values."
            )
        self.work(1 + size // 512)

    def admit(self, value: Any) -> Any:
        """Check and pay for the result of an operation; gives it back, iterators as lists."""
        kind = type(value)
        if kind is str:
            self.made(SCALAR + len(value))
        elif kind is bool or value is None:
            self.work()
        elif kind is int:
            self.work()
            if not -MAX_INT < value < MAX_INT:
                raise TemplateError("The chat template computes too large a number.")
        elif isinstance(value, Iterator) or kind in _VIEWS:
            value = self.gather(value)
            self.weigh(value)
        elif isinstance(value, list | tuple | dict | range):
            self.made(64 + 8 * len(value))
            self.weigh(value)
        else:
            self.work()
        return value

    def gather(self, items: Iterable[Any]) -> list[Any]:
        """Make a list of what an iterator gives, paying as it goes."""
        found = []
        for item in items:
            self.made(8)
            found.append(item)
        return found

    def weigh(self, value: Any) -> int:
        """Give the size of a value, and check it."""
        if type(value) is str:
            return SCALAR + len(value)
        size, _ = self._measure(value, 0)
        self.plan(size)
        return size

    def look(self, value: Any) -> None:
        """Pay for reading a value from end to end."""
        self.work(1 + self.weigh(value) // 512)

    def _measure(self, value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, str):
            return SCALAR + len(value), 0
        if isinstance(value, range):
            return SCALAR * (1 + len(value)), 1
        if not isinstance(value, list | tuple | dict):
            return SCALAR, 0
        known = self._known.get(id(value))
        if known is not None:
            return known[0], known[1]
        if depth > MAX_DEPTH:
            raise TemplateError(f"A value in the chat template is more than {MAX_DEPTH} deep.")
        self.work(1 + len(value) // 4)
        size = 64 + (Growable.ROOM if isinstance(value, Growable) else 0)
        below = 0
        for child in _children(value):
            child_size, child_depth = self._measure(child, depth + 1)
            size += child_size
            below = max(below, child_depth)
        if below >= MAX_DEPTH:
            raise TemplateError(f"A value in the chat template is more than {MAX_DEPTH} deep.")
        self._known[id(value)] = size, below + 1, value
        return size, below + 1


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def _children(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    else:
        yield from value


def size_of_input(value: Any, depth: int = 0) -> int:
    """Give the size of what a request brings, and check that it is plain JSON.

    Raises:
        TemplateError: nested too deeply, or of a type that JSON does not have.
    """
    if isinstance(value, str):
        return SCALAR + len(value)
    if isinstance(value, int) and abs(value) >= MAX_INPUT_INT:
        raise TemplateError("A number is too large.")
    if value is None or isinstance(value, int | float):
        return SCALAR
    if depth > MAX_DEPTH - 10:
        raise TemplateError("A value is nested too deeply.")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TemplateError("The keys of an object must be strings.")
        return 64 + sum(
            SCALAR + len(key) + size_of_input(child, depth + 1) for key, child in value.items()
        )
    if isinstance(value, list | tuple):
        return 64 + sum(size_of_input(child, depth + 1) for child in value)
    raise TemplateError(f"A value of type {type(value).__name__} is not JSON.")


_current: ContextVar[Meter | None] = ContextVar("trioserve_template_meter", default=None)


def current() -> Meter:
    """Give the meter of the render that is running.

    While a template is compiled none runs. Constant expressions may be evaluated then, once, and
    this gives them a meter of their own.
    """
    return _current.get() or Meter(Limits())


@contextmanager
def running(meter: Meter) -> Iterator[Meter]:
    """Make a meter the current one."""
    token = _current.set(meter)
    try:
        yield meter
    finally:
        _current.reset(token)
