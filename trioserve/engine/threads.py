"""`Threads`: runs each decode with the number of threads that is best for it now."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, process_time
from typing import Any

import structlog

from trioserve.engine.backend import ThreadedBackend
from trioserve.engine.encoder import Encoder
from trioserve.engine.thread_governor import HEAVY, LASTING_S, LOST_CORES, Step, ThreadGovernor
from trioserve.engine.watchdog import Watchdog
from trioserve.errors import DecodeInterruptedError

_log = structlog.stdlib.get_logger("trioserve.engine")


class Threads:
    """The threads of a backend. Used from the inference thread.

    Args:
        backend: computes.
        interrupt: ends what it computes, from any thread, and nothing has changed then. A step
            that takes far too long is ended and computed again with other threads.
        encoder: computes, too. While it does, neither takes the cores of the other, and nothing is
            learned of the threads.
    """

    def __init__(
        self,
        backend: ThreadedBackend,
        interrupt: Callable[[], None] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self._backend = backend
        self._encoder = encoder
        self._governor = ThreadGovernor(*backend.thread_choices)
        self._watchdog = Watchdog(interrupt) if interrupt is not None else None
        self._set = 0  # what was set last; 0: nothing, and the backend has what it began with
        self._now, self._since = self._governor.threads, monotonic()
        self._told = self._now
        self.rest()

    def close(self) -> None:
        """End what runs beside the inference thread."""
        if self._watchdog is not None:
            self._watchdog.close()

    def counters(self) -> dict[str, Any]:
        """Return what `EngineCounters` has of them, and of the encoder."""
        threads, threads_batch = self._governor.threads
        changes = self._governor.changes
        counters = {"threads": threads, "threads_batch": threads_batch, "thread_changes": changes}
        if self._encoder is not None:
            counters |= self._encoder.counters()
        return counters

    def run(self, n_tokens: int, compute: Callable[[], None]) -> None:
        """Compute a batch of so many tokens; raises what `compute` raises."""
        governor = self._governor
        if self._encoder is not None and self._encoder.is_busy:
            self._run_beside(self._encoder, n_tokens, compute)
            return
        if not governor.adapts:
            compute()
            return
        timer = self._begin(n_tokens)
        if not self._ends_in_time(compute, timer, governor.limit(n_tokens)):
            governor.give_up(timer.stop())
            timer = self._begin(n_tokens)
            compute()
        step = timer.stop()
        governor.observe(step)
        self._tell(step.end)

    def rest(self) -> None:
        """Leave all cores to the encoder: nothing is computed beside it for now."""
        if self._encoder is not None:
            self._encoder.set_threads(max(choices[-1] for choices in self._backend.thread_choices))

    def _run_beside(self, encoder: Encoder, n_tokens: int, compute: Callable[[], None]) -> None:
        """Compute while the encoder does, which has half of the threads.

        All of them together would wait for each other at every node of both graphs.
        """
        light, heavy = self._backend.thread_choices
        choices = heavy if n_tokens >= HEAVY else light
        # The same for steps of all sizes: an encoding with more of them would begin again.
        n_encoding = max(1, min(light[-1], heavy[-1]) // 2)
        encoder.set_threads(n_encoding)
        threads = max(choices[0], choices[-1] - n_encoding)
        if self._governor.adapts and threads != self._set:
            self._backend.set_threads(threads)
            self._set = threads
        compute()

    def _ends_in_time(
        self, compute: Callable[[], None], timer: _Timer, seconds: float | None
    ) -> bool:
        """Compute; returns whether it came to its end. After so many seconds it may be ended."""
        if seconds is None or self._watchdog is None:
            compute()
            return True
        watch = self._watchdog.begin(seconds, timer.has_lost_cores)
        try:
            compute()
        except DecodeInterruptedError:
            if not watch.has_ended:
                raise
            return False
        finally:
            self._watchdog.end()
        return True

    def _begin(self, n_tokens: int) -> _Timer:
        """Set the threads that a step is to have, and take the time from now on."""
        threads = self._governor.choose(n_tokens)
        if threads != self._set:
            self._backend.set_threads(threads)
            self._set = threads
        return _Timer(n_tokens, threads)

    def _tell(self, now: float) -> None:
        """Log a change once it has lasted."""
        numbers = self._governor.threads
        if numbers != self._now:
            self._now, self._since = numbers, now
        elif numbers != self._told and now - self._since > LASTING_S:
            event = "more threads again"
            if sum(numbers) < sum(self._told):
                event = "fewer threads, because other processes use the cores"
            self._told = numbers
            _log.info(event, threads=numbers[0], threads_batch=numbers[1])


class _Timer:
    """Takes the time of a step: that which passes, and that of the CPU."""

    __slots__ = ("_cpu_start", "_n_tokens", "_start", "_threads")

    def __init__(self, n_tokens: int, threads: int) -> None:
        self._n_tokens = n_tokens
        self._threads = threads
        self._start, self._cpu_start = monotonic(), process_time()

    def stop(self) -> Step:
        """Describe the step, which has come to its end."""
        cpu_seconds, now = process_time() - self._cpu_start, monotonic()
        return Step(self._n_tokens, now - self._start, cpu_seconds, now)

    def has_lost_cores(self) -> bool:
        """Whether the threads got less of the cores than they could have used, up to now."""
        step = self.stop()
        return self._threads - step.cpu_seconds / step.seconds > LOST_CORES
