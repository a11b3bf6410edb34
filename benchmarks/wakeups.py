"""The cost of waking the event loop from the inference thread.

    python -m benchmarks.wakeups

A thread notifies the event loop once, or many times in a row, and waits until it has answered. The
table has the time that the thread spends on each notification, and the CPU time of the event loop
and how often it wakes up, for each row of notifications.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable

import attrs
import trio

from benchmarks import report
from trioserve.server.dispatch import Bridge, EventFdBridge, RunSyncSoonBridge

ROUNDS = 7
N_ROWS = 1000
#: Seconds between two rows: the event loop is asleep by then.
PAUSE = 5e-4


class OtherEventFdBridge(EventFdBridge):
    """Writes with Python's own function, which releases the GIL."""

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)


class EachBridge(RunSyncSoonBridge):
    """Adds a callback for each notification."""

    def notify(self) -> None:
        self._token.run_sync_soon(self._bell.ring)


KINDS: dict[str, Callable[[], Bridge]] = {
    "eventfd, PyDLL": EventFdBridge,
    "eventfd, os.eventfd_write": OtherEventFdBridge,
    "run_sync_soon": EachBridge,
    "run_sync_soon, idempotent": RunSyncSoonBridge,
}


@attrs.frozen
class Cost:
    """The costs of a row of notifications: microseconds, and wake-ups."""

    notify_us: float  # of each notification, in the thread
    loop_us: float
    n_wakeups: float


async def measure(kind: Callable[[], Bridge], n_at_once: int) -> Cost:
    """Measure one kind."""
    bridge, token = kind(), trio.lowlevel.current_trio_token()
    answered = threading.Event()
    seconds, n_wakeups = 0.0, 0

    def notify() -> None:
        nonlocal seconds
        for _ in range(N_ROWS):
            time.sleep(PAUSE)
            began = time.perf_counter()
            for _ in range(n_at_once):
                bridge.notify()
            seconds += time.perf_counter() - began
            answered.wait()
            answered.clear()
        token.run_sync_soon(scope.cancel)

    thread = threading.Thread(target=notify)
    began = time.thread_time()
    with trio.CancelScope() as scope:
        thread.start()
        while True:
            await bridge.wait()
            n_wakeups += 1
            answered.set()
    loop_s = time.thread_time() - began
    thread.join()
    bridge.close()
    return Cost(seconds / N_ROWS / n_at_once * 1e6, loop_s / N_ROWS * 1e6, n_wakeups / N_ROWS)


def main() -> None:
    """Print the table: the medians of interleaved rounds."""
    report.arguments("wakeups", __doc__).parse_args()
    print("| at once | by | µs to notify | µs of the event loop | wake-ups |")
    print("|--:|---|--:|--:|--:|")
    for n_at_once in (1, 64):
        costs: dict[str, list[Cost]] = {name: [] for name in KINDS}
        for _ in range(ROUNDS):
            for name, kind in KINDS.items():
                costs[name].append(trio.run(measure, kind, n_at_once))
        for name, found in costs.items():
            notify, loop, wakeups = (
                statistics.median(getattr(cost, field.name) for cost in found)
                for field in attrs.fields(Cost)
            )
            print(f"| {n_at_once} | {name} | {notify:.1f} | {loop:.0f} | {wakeups:.1f} |")


if __name__ == "__main__":
    main()
