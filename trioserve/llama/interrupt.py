"""A flag that ends the `llama_decode` of a context, from any thread.

llama.cpp asks a callback before each node of its graph whether to go on, some hundred times in a
decode and from a thread of its own, so it must not be Python. C's `strlen` has the right shape: of
the text in a buffer it returns 0 while that is empty, and 1 once the flag is set.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trioserve.llama.library import lib


class Interrupt:
    """To be kept for as long as its context."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        address = ctypes.cast(_c_library().strlen, ctypes.c_void_p).value
        self.callback = lib.ggml_abort_callback(address)
        self._lock = threading.Lock()
        self._is_held = False

    def install(self, params: Any) -> None:
        """Have a context that is made with these parameters look at the flag."""
        params.abort_callback = self.callback
        params.abort_callback_data = ctypes.addressof(self._buffer)

    def set(self) -> None:
        """End the decode that runs, or else the next one."""
        with self._lock:
            if not self._is_held:
                self._buffer[0] = b"!"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let decodes run to their end in this block, whatever anybody asks."""
        with self._lock:
            self._is_held = True
            self.clear()
        try:
            yield
        finally:
            self._is_held = False

    def is_set(self) -> bool:
        """Whether a decode is to end, or has ended for this."""
        return self._buffer[0] != b"\0"

    def clear(self) -> None:
        """Let decodes run to their end."""
        self._buffer[0] = b"\0"


def _c_library() -> Any:
    return ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
