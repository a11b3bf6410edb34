"""The tasks that wait for a slot."""

from __future__ import annotations

from collections.abc import Iterator

from trioserve.engine.run import Run


class WaitingQueue:
    """First come, first served; a preempted run goes back to the front."""

    def __init__(self) -> None:
        # A dict keeps the order of arrival and finds a run by its id in constant time.
        self._runs: dict[int, Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def get(self, task_id: int) -> Run | None:
        """Find a run, if it is there."""
        return self._runs.get(task_id)

    def push(self, run: Run) -> None:
        """Add a run at the end."""
        self._runs[run.task.id] = run

    def push_front(self, run: Run) -> None:
        """Add a run that was preempted: it has waited before."""
        self._runs = {run.task.id: run, **self._runs}

    def remove(self, task_id: int) -> Run | None:
        """Take a run out, if it is there."""
        return self._runs.pop(task_id, None)
