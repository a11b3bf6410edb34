"""What one render of a chat template may spend: processor time, memory, and the size of a value.

The template of a GGUF is untrusted, and Python cannot kill a thread: a template has to be stopped
from inside. So the clock is read where a template repeats something, and what it makes is added
up. A step between two looks at the clock is short, because no value is larger than `Limits.value`.
The size of a value is that of what it prints: a list that holds one text a thousand times counts
it a thousand times. Otherwise sixty lists, each of the one before twice, would print for years.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

import attrs

from trioserve.errors import TemplateError

MIB = 1 << 20

#: How deep values may be nested; those of a request a little less, so that templates can wrap them.
MAX_DEPTH = 100
MAX_INPUT_DEPTH = 90

#: Integers that a template computes stay below this: larger ones can make dictionaries slow.
MAX_INT = 2**63

#: Integers in a request stay below this, which is more than JSON Schemas use as limits.
MAX_INPUT_INT = 2**70

#: The size of an empty value that is not text.
SCALAR = 32

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
    """What ``[]`` makes in a template: a list that may grow by plain values.

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
        """Refuse a value of this size, before it is made."""
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

    # -- what the code of a template goes through, see `trioserve.chat.template.sandbox`

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
        """Say that a loop is over."""
        self.place = self._outer.pop()


class Output(list[str]):
    """Pieces of text, counted as they come: what a template prints, or captures."""

    def __init__(self) -> None:
        super().__init__()
        self._meter = current()
        self._size = 0

    def append(self, piece: str) -> None:
        """Append a piece. Raises if the output exceeds its limit."""
        self._size += len(piece)
        if self._size > self._meter.max_value:
            self._meter.check_size(self._size)
        self._meter.made(8 + len(piece))
        super().append(piece)

    def extend(self, pieces: Iterable[str]) -> None:
        """Append several pieces."""
        for piece in pieces:
            self.append(piece)


def require(condition: bool, problem: str) -> None:
    """Raise `TemplateError` unless a condition holds. The template is what has the problem."""
    if not condition:
        raise TemplateError(f"The chat template {problem}.")


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


#: The meter of the render that is running. There is none while a template is compiled, so that
#: jinja2 fails to run filters on constants then, and leaves them for later.
running: ContextVar[Meter] = ContextVar("running")
current = running.get
