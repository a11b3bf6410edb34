"""A thread with a large stack, for grammars that llguidance compiles by recursion."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from trioserve.errors import OutputError

_T = TypeVar("_T")

#: Bytes of stack for a thread that compiles. llguidance follows references by recursion: a chain of
#: 1,000 overruns 8 MiB. Only what is used is ever allocated.
_STACK = 2**28 if sys.maxsize > 2**32 else 2**25


def with_stack(function: Callable[[], _T]) -> _T:
    """Call a function in a thread with a large stack; returns or raises what it does."""
    results: list[_T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)
        except BaseException as error:  # a panic in Rust
            failures.append(OutputError("The grammar cannot be compiled."))
            failures[0].__cause__ = error

    thread = threading.Thread(target=work, name="trioserve-compile", daemon=True)
    size = threading.stack_size(_STACK)
    try:
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
