"""Runs the batch of a step, on the threads that are best for it now, or ends it early."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic, process_time
from typing import Any

import attrs

from trioserve.engine.backend import AnyBackend, Backend
from trioserve.engine.encoder import MediaEncoder
from trioserve.engine.helpers import start
from trioserve.engine.planner import StepPlan
from trioserve.engine.thread_governor import HEAVY, LASTING_S, LOST_CORES, Step, ThreadGovernor
from trioserve.errors import DecodeInterruptedError
from trioserve.log import get_logger
from trioserve.types import Adapters


@attrs.define
class Watch:
    """A decode that is watched."""

    seconds: float
    end: float  # when it is overdue (monotonic)
    is_hopeless: Callable[[], bool]
    #: It was ended early.
    has_ended: bool = False


class Watchdog:
    """Interrupts overdue decodes, from a thread that `start` starts and `close` ends.

    Waking the thread for each step would cost too much. It sleeps until the decode that it has
    seen would be overdue, and then looks at the one that runs.

    Args:
        interrupt: ends the decode that runs, from any thread.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._watch: Watch | None = None
        self._wakes_at = math.inf
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._closed = False

    def start(self) -> None:
        """Start the thread. Raises ModelLoadError: the system refuses it."""
        start(self._thread)

    def begin(self, seconds: float, is_hopeless: Callable[[], bool]) -> Watch:
        """Interrupt the decode if `end` is not called within `seconds` and it is hopeless then.

        Otherwise, check again after twice the time.
        """
        watch = Watch(seconds, monotonic() + seconds, is_hopeless)
        with self._changed:
            self._watch = watch
            if watch.end < self._wakes_at:
                self._changed.notify()
        return watch

    def end(self) -> None:
        """End the watch. From now on, nothing is interrupted."""
        with self._changed:
            self._watch = None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                seconds = self._look()
                self._wakes_at = math.inf if seconds is None else monotonic() + seconds
                self._changed.wait(seconds)

    def _look(self) -> float | None:
        """Check the running decode; returns in how many seconds to check again."""
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


def _has_lost_cores(threads: int, start: float, cpu_start: float) -> bool:
    """True if the threads got less of the cores since then than they could have used."""
    cpu_seconds, seconds = process_time() - cpu_start, monotonic() - start
    return threads - cpu_seconds / seconds > LOST_CORES


_log = get_logger("trioserve.engine")


class Threads:
    """The threads of a backend. Used from the inference thread.

    Args:
        backend: computes.
        interrupt: ends a computation, from any thread, without changing anything. A step that takes
            far too long is interrupted and computed again with a different number of threads.
        encoder: computes, too. Meanwhile the two share the cores, and steps are not measured.
    """

    def __init__(
        self,
        backend: AnyBackend,
        interrupt: Callable[[], None] | None = None,
        encoder: MediaEncoder | None = None,
    ) -> None:
        self._backend = backend
        self._encoder = encoder
        light, heavy = backend.thread_choices
        self._adapts = len(light) > 1 or len(heavy) > 1
        self._heavy = ThreadGovernor(heavy)
        self._light = ThreadGovernor(light, self._heavy)
        self._watchdog = Watchdog(interrupt) if interrupt is not None else None
        self._most = max(choices[-1] for choices in backend.thread_choices)
        self._set = 0  # the number set last; 0: none, so the backend has its first number
        self._now, self._since = (self._light.threads, self._heavy.threads), monotonic()
        self._logged = self._now
        self.rest()

    def start(self) -> None:
        """Start the watchdog's thread. Raises ModelLoadError: the system refuses it."""
        if self._watchdog is not None:
            self._watchdog.start()

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()

    def counters(self) -> dict[str, Any]:
        """Return the fields of `EngineCounters` for threads and the encoder."""
        light, heavy = self._light, self._heavy
        counters = {
            "threads": light.threads,
            "threads_batch": heavy.threads,
            "thread_changes": light.changes + heavy.changes,
        }
        if self._encoder is not None:
            counters |= self._encoder.counters()
        return counters

    def run(self, n_tokens: int, compute: Callable[[], None]) -> None:
        """Compute a batch of `n_tokens` tokens; raises what `compute` raises."""
        if self._encoder is not None and self._encoder.is_busy:
            self._run_beside(self._encoder, n_tokens, compute)
            return
        if not self._adapts:
            compute()
            return
        governor = self._heavy if n_tokens >= HEAVY else self._light
        for watchdog in (self._watchdog, None):
            (threads, limit), watch = governor.plan(n_tokens), None
            if threads != self._set:
                self._set_threads(threads)
            start, cpu_start = monotonic(), process_time()
            if watchdog is not None and limit is not None:
                has_lost_cores = partial(_has_lost_cores, threads, start, cpu_start)
                watch = watchdog.begin(limit, has_lost_cores)
            try:
                compute()
                has_ended = False
            except DecodeInterruptedError:
                has_ended = watch is not None and watch.has_ended
                if not has_ended:
                    raise
            finally:
                if watchdog is not None and watch is not None:
                    watchdog.end()
            cpu_seconds, now = process_time() - cpu_start, monotonic()
            step = Step(n_tokens, now - start, cpu_seconds, now)
            if not has_ended:
                break
            governor.give_up(step)  # it is computed again
        governor.observe(step)
        has_lasted = self._logged != self._now and now - self._since > LASTING_S
        if has_lasted or self._now != (self._light.threads, self._heavy.threads):
            self._log_change(now)

    def rest(self) -> None:
        """Leave all cores to the encoder: there is no step to compute."""
        if self._encoder is not None and self._encoder.threads != self._most:
            self._encoder.set_threads(self._most)

    def _run_beside(
        self, encoder: MediaEncoder, n_tokens: int, compute: Callable[[], None]
    ) -> None:
        """Compute while the encoder does, which has half of the threads."""
        # All of them together would wait for each other at every node of both graphs.
        light, heavy = self._backend.thread_choices
        choices = heavy if n_tokens >= HEAVY else light
        # The same for steps of all sizes: an encoding with more of them would begin again.
        n_encoding = max(1, min(light[-1], heavy[-1]) // 2)
        encoder.set_threads(n_encoding)
        threads = max(choices[0], choices[-1] - n_encoding)
        if self._adapts:
            self._set_threads(threads)
        compute()

    def _set_threads(self, threads: int) -> None:
        if threads != self._set:
            self._backend.set_threads(threads)
            self._set = threads

    def _log_change(self, now: float) -> None:
        """Log a change once it has lasted."""
        numbers = self._light.threads, self._heavy.threads
        if numbers != self._now:
            self._now, self._since = numbers, now
        else:
            event = "more threads again"
            if sum(numbers) < sum(self._logged):
                event = "fewer threads, because other processes use the cores"
            self._logged = numbers
            _log.info(event, threads=numbers[0], threads_batch=numbers[1])


class Interrupts:
    """Ends a batch early when the task is cancelled that has at least half of it.

    One of the background alone also ends when another request arrives. What is lost has to be
    computed again, so no two batches in a row are ended that others need, nor two in a row of those
    of the background: it would stand still where requests arrive all the time.

    Args:
        interrupt: ends the batch that runs, from any thread.
        has_come: see `Inbox.has_come`.
    """

    def __init__(
        self, interrupt: Callable[[], None], has_come: Callable[[int | None, bool], bool]
    ) -> None:
        self._interrupt, self._has_come = interrupt, has_come
        self._task_id: int | None = None
        #: This batch is of the background alone; it may be ended; the last such batch was.
        self._is_behind = self._yields = self._has_yielded = False
        #: The last batch was.
        self.was_interrupted = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compute a batch in this block."""
        try:
            yield
            self.was_interrupted = False
            self._has_yielded = self._has_yielded and not self._is_behind
        except DecodeInterruptedError:
            self.was_interrupted = True
            self._has_yielded = self._has_yielded or self._yields
            raise
        finally:
            self._task_id, self._is_behind, self._yields = None, False, False

    def begin(self, task_id: int, n_cells: int, n_others: int, *, yields: bool = False) -> None:
        """Note which task has most of the batch: it has `n_cells`, and the others `n_others`.

        With `yields`, the batch is of the background alone. A command that arrived after the step
        had taken its commands, and before this note, interrupted nothing. So look for one after the
        note: each is in the inbox by then, or finds the note.

        Raises DecodeInterruptedError: there is one, so the batch need not be computed.
        """
        self._is_behind, self._yields = yields, yields and not self._has_yielded
        if n_cells >= n_others and not (n_others and self.was_interrupted):
            self._task_id = task_id
        if self._has_come(self._task_id, self._yields):
            raise DecodeInterruptedError("A command came before the batch.")

    def cancel(self, task_id: int) -> None:
        """End the batch if most of it is of this task. From any thread.

        If that crosses with its end, the next one is ended, and begins again.
        """
        if task_id == self._task_id:
            self._interrupt()

    def arrive(self) -> None:
        """End the batch if it yields. From any thread."""
        if self._yields:
            self._interrupt()


#: A decode of fewer tokens of a prompt ends soon by itself.
MIN_INTERRUPTED = 64


class BatchDecoder:
    """Fills the backend's batch, and decodes it with the right adapters and threads.

    Args:
        backend: decodes.
        interrupts: ends a decode when its task is cancelled.
        encoder: see `Threads`.
    """

    def __init__(
        self, backend: Backend, interrupts: Interrupts, encoder: MediaEncoder | None
    ) -> None:
        self.threads = Threads(backend, backend.interrupt, encoder)
        self._backend, self._interrupts = backend, interrupts
        self._adapters: Adapters = ()  # that the backend has set

    def unset_adapters(self) -> None:
        """Have the backend use no LoRA adapters until the next batch."""
        if self._adapters:
            self._backend.set_adapters(())
            self._adapters = ()

    def decode(self, plan: StepPlan) -> list[int]:
        """Decode one batch; returns the row to sample from of each slot in it.

        Raises DecodeError: as `Backend.decode`, and when the adapters cannot be used.
        """
        if plan.adapters != self._adapters:
            self._backend.set_adapters(plan.adapters)
            self._adapters = plan.adapters
        if plan.n_left:
            self._backend.batch.advance(plan.keys)
            self.threads.run(plan.n_cells, self._backend.decode)
            self._interrupts.was_interrupted = False
            return plan.rows
        with self._interrupts.watching():
            if plan.is_media:
                pieces, rows = plan.media(), list[int]()
                self._begin(plan)
                self.threads.run(
                    plan.n_cells, lambda: rows.extend(self._backend.decode_media(pieces))
                )
                return rows
            rows = plan.fill(self._backend.batch)
            if plan.others and plan.n_cells > MIN_INTERRUPTED:
                self._begin(plan)
            self.threads.run(plan.n_cells, self._backend.decode)
            return rows

    def _begin(self, plan: StepPlan) -> None:
        """Note whose prompt a cancel interrupts: the one with most of the batch."""
        largest = max(plan.others, key=lambda piece: piece.n_cells)
        assert largest.slot.request is not None
        task_id, n_cells = largest.slot.request.task.id, largest.n_cells
        if n_cells >= MIN_INTERRUPTED or plan.yields:
            n_others = plan.n_cells - n_cells
            self._interrupts.begin(task_id, n_cells, n_others, yields=plan.yields)
