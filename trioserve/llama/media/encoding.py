"""What libmtmd has no functions for: to end an encoding early, and to change its threads."""

from __future__ import annotations

import ctypes
import threading
from time import perf_counter
from typing import Any

from trioserve.llama.library import lib

#: Seconds of computing after which the callback wants to be asked: an interrupt takes as long.
_PACE = 0.003
_MAX_STRIDE = 256

#: A number of threads that no machine has, to find where a context keeps it.
_MARK = 0x2B7E1516
#: Bytes at the start of a context to look for it in.
_REACH = 256


class Interrupt:
    """Ends the encoding that runs.

    libmtmd asks a callback before each node of its graph whether it wants the result; if it does,
    it computes what it has, and asks again whether to go on. Each wish costs a wait for all
    threads, so there is one for about every 3 ms of computing.
    """

    def __init__(self) -> None:
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)
        self._lock = threading.Lock()
        self._is_running = False
        self._is_set = False
        self._stride = 1
        self._n_asked = 0
        self._since = 0.0

    def start(self) -> None:
        """Note that an encoding begins."""
        with self._lock:
            self._is_running, self._is_set = True, False
        self._n_asked, self._since = 0, perf_counter()

    def end(self) -> bool:
        """Note that it has ended; returns whether it was ended early."""
        with self._lock:
            self._is_running = False
            return self._is_set

    def set(self) -> None:
        """End the encoding that runs; without one, do nothing. From any thread."""
        with self._lock:
            self._is_set = self._is_running

    def _on_node(self, _tensor: Any, is_asking: bool, _data: Any) -> bool:
        if is_asking:
            self._n_asked += 1
            return self._is_set or self._n_asked >= self._stride
        now = perf_counter()
        if now - self._since > _PACE:
            self._stride = max(1, self._stride // 2)
        elif now - self._since < _PACE / 2:
            self._stride = min(_MAX_STRIDE, self._stride * 2)
        self._n_asked, self._since = 0, now
        return not self._is_set


class Threads:
    """The number of threads of a context, which libmtmd reads at the start of each encoding.

    It has no function that changes it, so this looks for its place: a context is made with a number
    that stands nowhere else.
    """

    MARK = _MARK

    def __init__(self, context: int) -> None:
        numbers = (ctypes.c_int32 * (_REACH // 4)).from_address(context)
        places = [place for place, number in enumerate(numbers) if number == _MARK]
        self._place = 4 * places[0] if len(places) == 1 else None
        self._context = context

    @property
    def is_found(self) -> bool:
        """Whether the place was found."""
        return self._place is not None

    def set(self, count: int) -> None:
        """Encode with so many threads from the next chunk on."""
        if self._place is not None:
            ctypes.c_int32.from_address(self._context + self._place).value = count
