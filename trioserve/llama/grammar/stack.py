"""A thread with a large stack, for grammars that llguidance compiles by recursion."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from outcome import Outcome, capture

from trioserve.errors import OutputError, UnavailableError

_T = TypeVar("_T")

#: Bytes of stack for a thread that compiles. llguidance follows references by recursion: a chain of
#: 1,000 overruns 8 MiB. Only what is used is ever allocated.
_STACK = 2**28 if sys.maxsize > 2**32 else 2**25

_lock = threading.Lock()


def with_stack(function: Callable[[], _T]) -> _T:
    """Call a function in a thread with a large stack; returns or raises what it does.

    Raises:
        UnavailableError: there is no such thread now.
    """
    results: list[Outcome[_T]] = []

    def work() -> None:
        results.append(capture(function))

    thread = threading.Thread(target=work, name="trioserve-compile", daemon=True)
    with _lock:  # the size is one for the whole process
        size = threading.stack_size(_STACK)
        try:
            thread.start()
        except RuntimeError as error:
            raise UnavailableError(
                "A grammar needs a thread that the system refuses: it limits threads or memory."
            ) from error
        finally:
            threading.stack_size(size)
    thread.join()
    try:
        return results[0].unwrap()
    except Exception:
        raise
    except BaseException as error:  # a panic in Rust
        raise OutputError("The grammar cannot be compiled.") from error
