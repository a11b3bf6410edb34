"""A simulation: streams beside a batch, on machines that a function of the rows describes.

    python -m tests.engine.background_simulation docs/background.svg

draws what `Background.SHARE` does: what a stream keeps of its tokens, and what a batch gets. Steps
vary as on a machine with other work.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.engine_harness import Harness
from trioserve.bench import plot
from trioserve.bench.stats import Spread, spread
from trioserve.engine.background import Background
from trioserve.testing import ScriptedBackend
from trioserve.types import Chunk, Finished

#: Milliseconds of a step, by the number of its rows.
Cost = Callable[[int], float]

COSTS: dict[str, Cost] = {
    "a row costs a step": lambda n: 10.0 * n,
    "rows cost a third": lambda n: 10.0 + 10 / 3 * (n - 1),
    "rows cost nothing": lambda n: 10.0 + 0.01 * n,
    "from the second row on, twice as much": lambda n: 10.0 if n == 1 else 20.0 + 0.1 * n,
}


def endless(prompt: str) -> str:
    return "abcdefghij" * 400


class Machine(Harness):
    """An engine whose steps take the time that a test says, with a reader of each answer."""

    def __init__(self, cost: Cost = COSTS["rows cost a third"], **options: int) -> None:
        backend = ScriptedBackend(endless, **{"n_slots": 8, "n_ctx": 20_000, **options})
        super().__init__(backend, max_tick_ms=0)
        self.cost = cost
        self.n_last, self._n_begun = 100, 100  # the lines of a batch have numbers above that
        self._read_at: dict[int, list[float]] = {}
        self._due: dict[int, float] = {}
        self._n_seen: dict[int, int] = {}

    def _timed(self, n_rows: int, seqs: set[int]) -> None:
        self.seconds += self.cost(n_rows) / 1e3
        self._begin_decode(n_rows, seqs)

    def step(self) -> bool:
        work_left = super().step()
        for task_id, events in list(self.events.items()):
            for event in events[self._n_seen.get(task_id, 0) :]:
                if isinstance(event, Chunk):
                    self._read(task_id, event)
            self._n_seen[task_id] = len(events)
        return work_left

    def _read(self, task_id: int, chunk: Chunk) -> None:
        """Note when the reader gets a chunk: as `Stream` does."""
        due = self._due.get(task_id, 0.0) if chunk.pace else 0.0
        at = max(self.seconds, due)
        self._due[task_id] = at + chunk.pace
        self._read_at.setdefault(task_id, []).append(at)

    def gaps(self, task_id: int) -> list[float]:
        """The milliseconds between two tokens, for the reader."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(self._read_at[task_id])]

    def n_tokens(self, task_id: int) -> int:
        return len(self._read_at.get(task_id, ()))

    def send_lines(self, n_live: int, **options: int) -> None:
        """Keep that many lines of a batch in the engine."""
        lines = range(101, self._n_begun + 1)
        n_over = sum(isinstance(self.events[n][-1], Finished) for n in lines if self.events[n])
        for _ in range(n_live - (len(lines) - n_over)):
            self._n_begun += 1
            prompt = "common beginning" + f"{self._n_begun}" * 8
            self.submit(self._n_begun, prompt, priority=-100, **{"max_tokens": 32, **options})

    def run_beside(self, n_tokens: int, task_id: int = 1, n_lines: int = 10) -> None:
        """Step beside a batch until a task has that many tokens more."""
        n_tokens += self.n_tokens(task_id)
        while self.n_tokens(task_id) < n_tokens:
            self.send_lines(n_lines)
            self.step()

    def n_line_tokens(self) -> int:
        return sum(self.n_tokens(n) for n in range(101, self._n_begun + 1))


SHARES, SEEDS = (0.05, 0.1, 0.25, 0.5, 1.0), range(3)
N_WARM, N_TOKENS = 100, 400  # tokens of a stream, before and while it is measured


def noise(seed: int) -> Iterator[float]:
    """Yield factors for steps: most vary by a tenth, one in thirty takes three times as long."""
    numbers = random.Random(seed)
    while True:
        yield numbers.lognormvariate(0, 0.1) * (3 if numbers.random() < 1 / 30 else 1)


def rates(cost: Cost, n_lines: int, seed: int) -> tuple[float, float]:
    """Return the tokens a second of a stream, and of a batch beside it."""
    factors = noise(seed)
    machine = Machine(lambda n_rows: cost(n_rows) * next(factors))
    machine.submit(1, "interactive")
    machine.run_beside(N_WARM, n_lines=n_lines)
    began, n_before = machine.seconds, machine.n_line_tokens()
    machine.run_beside(N_TOKENS, n_lines=n_lines)
    seconds = machine.seconds - began
    return N_TOKENS / seconds, (machine.n_line_tokens() - n_before) / seconds


def draw() -> str:
    """Run all, and return the picture."""
    kept, got = ({name: list[tuple[float, Spread]]() for name in COSTS} for _ in range(2))
    for name, cost in COSTS.items():
        alone = [rates(cost, 0, seed)[0] for seed in SEEDS]
        for share in SHARES:
            Background.SHARE = share
            found = [rates(cost, 10, seed) for seed in SEEDS]
            for lines, i in ((kept, 0), (got, 1)):
                values = [pair[i] / one for pair, one in zip(found, alone, strict=True)]
                if (value := spread(values)) is not None:
                    lines[name].append((share, value))
    charts = [
        plot.Chart(title=title, x_title="SHARE", more_is_better=True, lines=lines)
        for title, lines in (("stream, of its tokens alone", kept), ("batch, of the same", got))
    ]
    caption = "One stream beside a batch, simulated. Bands reach over three runs."
    return plot.curves("Tokens a second beside a batch", [*COSTS], charts, caption)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
