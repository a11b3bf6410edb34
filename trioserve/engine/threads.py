"""`Threads`: runs each decode with the number of threads that is best for it now."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, process_time

import structlog

from trioserve.engine.backend import ThreadedBackend
from trioserve.engine.thread_governor import LASTING_S, ThreadGovernor, Tick

_log = structlog.stdlib.get_logger("trioserve.engine")


class Threads:
    """The threads of a backend. Used from the inference thread."""

    def __init__(self, backend: ThreadedBackend) -> None:
        self._backend = backend
        self._governor = ThreadGovernor(*backend.thread_choices)
        self._set = 0  # what was set last; 0: nothing, and the backend has what it began with
        self._now, self._since = self._governor.threads, monotonic()
        self._told = self._now

    def counters(self) -> dict[str, int]:
        """Return what `EngineCounters` has of them."""
        threads, threads_batch = self._governor.threads
        changes = self._governor.changes
        return {"threads": threads, "threads_batch": threads_batch, "thread_changes": changes}

    def run(self, n_tokens: int, compute: Callable[[], None]) -> None:
        """Compute a batch of so many tokens; raises what `compute` raises."""
        governor = self._governor
        if not governor.adapts:
            compute()
            return
        threads = governor.choose(n_tokens)
        if threads != self._set:
            self._backend.set_threads(threads)
            self._set = threads
        start, cpu_start = monotonic(), process_time()
        compute()
        cpu_seconds, now = process_time() - cpu_start, monotonic()
        governor.observe(Tick(n_tokens, now - start, cpu_seconds, now))
        self._tell(now)

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
