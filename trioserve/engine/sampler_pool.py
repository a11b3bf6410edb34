"""Sampling the tokens of a step: one after the other, or side by side where cores are free."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs

from trioserve.engine.backend import Backend, Sampler
from trioserve.engine.run import Run
from trioserve.errors import TrioServeError
from trioserve.types import GenerationParams, TokenId, TokenProbs

#: With fewer tokens in a step, handing them out takes longer than sampling them.
MIN_PARALLEL = 4
#: The most tokens to take at once that a grammar leaves no choice about: what a step may have of a
#: prompt beside streams, whatever it costs.
MAX_AHEAD = 16


@attrs.frozen
class Draw:
    """A token that was sampled, with its probabilities if the task asks for them."""

    token: TokenId
    probs: TokenProbs | None = None


#: What was sampled for a run: mostly one token, without anything else to say of it.
Drawn = TokenId | list[Draw] | TrioServeError


class SamplerPool:
    """Samples for many runs at once. Samplers are C, and release the GIL.

    Args:
        backend: whose samplers they are. The cores that it leaves to others are used.
    """

    def __init__(self, backend: Backend) -> None:
        self._n_threads = n_threads = min(backend.n_spare_cores, backend.n_slots)
        self._ends = backend.vocab.end_of_generation  # nothing is sampled after one of them
        self._n_ctx_seq = backend.n_ctx_seq
        # The next step must have room for those of all slots, beside all rows with logits.
        n_left = backend.n_batch - backend.n_outputs
        self._n_ahead = min(MAX_AHEAD, n_left // backend.n_slots)
        self._threads = ThreadPoolExecutor(n_threads, "trioserve-sampler") if n_threads else None

    def draw(self, runs: Sequence[Run], rows: Sequence[int]) -> list[Drawn]:
        """Sample for each run, from its row of logits.

        That is one token, and where the run has a draft, one more for each token of it that was
        sampled, too; the rows of the draft follow. After each one come those that a grammar leaves
        no choice about. An error is that of one run; the others have
        their tokens.
        """
        if self._threads is None or len(runs) < MIN_PARALLEL:
            return self._draw_all(runs, rows)
        # The first look at a batch's logits puts them in order, so it has to be alone.
        results = self._draw_all(runs[:1], rows[:1]) * len(runs)
        parts = [slice(1 + i, None, self._n_threads + 1) for i in range(self._n_threads + 1)]
        others = [
            self._threads.submit(self._draw_all, runs[part], rows[part]) for part in parts[1:]
        ]
        drawn = [self._draw_all(runs[parts[0]], rows[parts[0]])]
        drawn += [other.result() for other in others]
        for part, its in zip(parts, drawn, strict=True):
            results[part] = its
        return results

    def close(self) -> None:
        """End the threads. They have nothing to do between two steps."""
        if self._threads is not None:
            self._threads.shutdown()

    def _draw_all(self, runs: Sequence[Run], rows: Sequence[int]) -> list[Drawn]:
        drawn: list[Drawn] = []
        for run, row in zip(runs, rows, strict=True):
            sampler = run.sampler
            assert sampler is not None
            try:
                task = run.task
                if run.draft or run.forced or task.params.n_probs or task.constraint is not None:
                    drawn.append(self._draw_several(run, sampler, row))
                else:
                    drawn.append(sampler.sample(row))
            except TrioServeError as error:
                drawn.append(error)
        return drawn

    def _draw_several(self, run: Run, sampler: Sampler, row: int) -> list[Draw]:
        params, draft = run.task.params, run.draft
        draws: list[Draw] = []
        tokens: list[TokenId] = []
        first = row
        while True:
            row = first + len(draws)
            if run.forced:
                token = run.forced.popleft()
                draw = Draw(token, _force(sampler, token, row, params))
            elif not params.n_probs:
                draw = Draw(sampler.sample(row))
            else:
                post = params.post_sampling_probs
                draw = Draw(*sampler.sample_with_probs(row, params.n_probs, post=post))
            tokens.append(draw.token)
            ahead = self._take_forced(run, sampler, tokens)
            tokens += ahead
            draws += [draw, *map(Draw, ahead)]
            if draw.token in self._ends or draft[: len(tokens)] != tokens:
                return draws

    def _take_forced(self, run: Run, sampler: Sampler, tokens: list[TokenId]) -> Sequence[TokenId]:
        """Take the tokens that must follow those of this step, unless something else chooses."""
        params = run.task.params
        if run.task.constraint is None or run.forced or params.n_probs or not run.is_free:
            return ()
        n_max = min(self._n_ahead, self._n_ctx_seq - len(run.keys) - len(tokens))
        return sampler.forced(n_max) if n_max > 0 and tokens[-1] not in self._ends else ()


def _force(
    sampler: Sampler, token: TokenId, row: int, params: GenerationParams
) -> TokenProbs | None:
    probs = None
    if params.n_probs:
        probs = sampler.probs(row, token, params.n_probs, post=params.post_sampling_probs)
    sampler.accept(token)
    return probs
