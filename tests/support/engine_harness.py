"""An engine on a scripted backend, stepping by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.support.engine_events import take_events
from trioserve.engine import DecodeMaximal, Engine
from trioserve.testing import ScriptedBackend
from trioserve.types import (
    Admitted,
    CacheRoot,
    Chunk,
    Event,
    Finished,
    GenerationParams,
    Prompt,
    Task,
)


class Harness:
    """An engine, and what it has said to each task.

    Time is virtual: a decode takes 0.1 ms, and 10 microseconds more for each row. So a machine that
    stands still for a moment does not change what the strategy decides.
    """

    def __init__(
        self,
        backend: ScriptedBackend | None = None,
        max_tick_ms: float = 50.0,
        **settings: Any,
    ) -> None:
        self.backend = backend or ScriptedBackend()
        self.rings = 0
        self.engine = Engine(self.backend, DecodeMaximal(max_tick_ms), self._ring, **settings)
        self.seconds = 0.0
        self.engine.clock = lambda: self.seconds
        self._begin_decode = self.backend._begin_decode
        self.backend._begin_decode = self._timed  # type: ignore[method-assign]
        self.events: dict[int, list[Event]] = defaultdict(list)
        self.admitted: list[int] = []

    def _timed(self, n_rows: int, seqs: set[int]) -> None:
        self.seconds += 1e-4 + 1e-5 * n_rows
        self._begin_decode(n_rows, seqs)

    def _ring(self) -> None:
        self.rings += 1

    def submit(
        self,
        task_id: int,
        prompt: str,
        root: CacheRoot | None = None,
        divergence_points: Sequence[int] = (),
        client: str = "",
        weight: float = 1.0,
        **options: object,
    ) -> None:
        params, root = GenerationParams(**options), root or CacheRoot()
        made = Prompt(prompt.encode(), divergence_points=divergence_points)
        task = Task(task_id, made, params, client, weight, root=root)
        self.engine.check(task)
        self.engine.submit(task)

    def step(self) -> bool:
        work_left = self.engine.step()
        self.engine.check_integrity()
        for event in take_events(self.engine):
            if isinstance(event, Admitted):
                self.admitted.append(event.task_id)
            else:
                self.events[event.task_id].append(event)
        return work_left

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the engine does not come to an end")

    def complete(self, task_id: int, prompt: str, *args: Any, **options: Any) -> None:
        """Submit a task, and run until nothing is left to do."""
        self.submit(task_id, prompt, *args, **options)
        self.run()

    def text(self, task_id: int) -> str:
        return "".join(event.text for event in self.events[task_id] if isinstance(event, Chunk))

    def finish(self, task_id: int) -> Finished:
        last = self.events[task_id][-1]
        assert isinstance(last, Finished)
        return last

    def states(self) -> list[str]:
        return [slot.state for slot in self.engine.status().slots]
