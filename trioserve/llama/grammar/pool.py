"""MaskPool: threads that make the next masks while `llama_decode` runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from trioserve.errors import TrioServeError
from trioserve.llama.grammar.masks import Mask
from trioserve.types import TokenId

#: Seconds that the inference thread waits for a mask; it should take a thousandth of that.
_WAIT_SECONDS = 5.0

#: A function that makes a mask, the token it takes, and where the mask goes.
Job = tuple[Callable[[TokenId], Mask], TokenId, Future[Mask]]


class MaskPool:
    """A small pool of threads, for the inference thread and those that sample beside it.

    Args:
        n_threads: how many masks can be made at the same time.
    """

    def __init__(self, n_threads: int) -> None:
        #: Masks to make with the next `start`, by where they go.
        self._due: dict[Future[Mask], Job] = {}
        self._lock = threading.Lock()
        self._n_threads = max(1, n_threads)
        self._executor = ThreadPoolExecutor(self._n_threads, thread_name_prefix="trioserve-grammar")

    def add(self, make: Callable[[TokenId], Mask], token: TokenId) -> Future[Mask]:
        """Have a mask made with the next `start`; returns where it goes."""
        pending: Future[Mask] = Future()
        self.put(make, token, pending)
        return pending

    def put(self, make: Callable[[TokenId], Mask], token: TokenId, pending: Future[Mask]) -> None:
        """Have a mask made after all, that was taken back."""
        with self._lock:
            self._due[pending] = make, token, pending

    def take_back(self, pending: Future[Mask]) -> bool:
        """Do not have a mask made, if it has not begun; returns whether that is so."""
        with self._lock:
            return self._due.pop(pending, None) is not None

    def start(self) -> None:
        """Have the masks made that are due.

        To be called just before a decode, which leaves the GIL to the pool. Sampling would have to
        share it.
        """
        if self._due:
            with self._lock:
                due = list(self._due.values())
                self._due.clear()
            for i in range(min(self._n_threads, len(due))):
                self._executor.submit(_make, due[i :: self._n_threads])

    def result(self, pending: Future[Mask]) -> Mask:
        """Wait for a mask. Raises what its job raised, or `TimeoutError`."""
        with self._lock:
            job = self._due.pop(pending, None)
        if job is not None:  # nothing was decoded since it became due
            self._executor.submit(_make, [job])
        return pending.result(_WAIT_SECONDS)

    def close(self) -> None:
        """Drop what is due, and wait for the masks that are being made."""
        with self._lock:
            self._due.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _make(jobs: list[Job]) -> None:
    for make, token, pending in jobs:
        if not pending.set_running_or_notify_cancel():
            continue  # its task is gone
        try:
            pending.set_result(make(token))
        except TrioServeError as error:
            pending.set_exception(error)
