"""`Watchdog`: ends a decode that takes far too long because other processes use the cores."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from time import monotonic

import attrs


@attrs.define
class Watch:
    """A decode that is watched."""

    seconds: float
    end: float  # when it is overdue (monotonic)
    is_hopeless: Callable[[], bool]
    #: Whether it was ended early.
    has_ended: bool = False


class Watchdog:
    """Has a thread of its own, which begins with the first watch and ends with `close`.

    Steps follow one another quickly, so the thread is not told of each. It sleeps until the decode
    that it has seen would be overdue, and then looks at the one that runs.

    Args:
        interrupt: ends the decode that runs, from any thread.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._watch: Watch | None = None
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, seconds: float, is_hopeless: Callable[[], bool]) -> Watch:
        """End what runs, up to `end`, if it takes so long and is hopeless then.

        If it is not, it is looked at again after twice as long.
        """
        watch = Watch(seconds, monotonic() + seconds, is_hopeless)
        with self._changed:
            self._watch = watch
            if watch.end < self._wakes_at:
                self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        return watch

    def end(self) -> None:
        """End the watch. From now on, nothing is ended."""
        with self._changed:
            self._watch = None

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                seconds = self._look()
                self._wakes_at = math.inf if seconds is None else monotonic() + seconds
                self._changed.wait(seconds)

    def _look(self) -> float | None:
        """Look at what runs; returns in how many seconds to look again."""
        watch = self._watch
        if watch is None or watch.has_ended:
            return None
        left = watch.end - monotonic()
        if left > 0:
            return left
        if watch.is_hopeless():
            watch.has_ended = True
            self._interrupt()
            return None
        watch.seconds *= 2
        watch.end += watch.seconds
        return max(0.0, watch.end - monotonic())
