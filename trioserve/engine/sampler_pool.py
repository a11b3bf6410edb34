"""Sampling the tokens of a tick: one after the other, or side by side where cores are free."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs

from trioserve.engine.backend import Sampler
from trioserve.engine.run import Run
from trioserve.errors import TrioServeError
from trioserve.types import GenerationParams, TokenId, TokenProbs

#: With fewer tokens in a tick, handing them out takes longer than sampling them.
MIN_PARALLEL = 4


@attrs.frozen
class Draw:
    """A token that was sampled, with its probabilities if the task asks for them."""

    token: TokenId
    probs: TokenProbs | None = None


class SamplerPool:
    """Samples for many runs at once. Samplers are C, and release the GIL.

    Args:
        n_threads: threads to use beside the caller's; 0: none.
        end_of_generation: tokens after which nothing is sampled, even if a draft goes on.
    """

    def __init__(self, n_threads: int, end_of_generation: frozenset[TokenId] = frozenset()) -> None:
        self._n_threads = n_threads
        self._ends = end_of_generation
        self._threads = ThreadPoolExecutor(n_threads, "trioserve-sampler") if n_threads else None

    def draw(self, work: Sequence[tuple[Run, int]]) -> list[list[Draw] | TrioServeError]:
        """Sample for each pair of a run and its row of logits.

        That is one token, and where the run has a draft, one more for each token of it that was
        sampled, too; the rows of the draft follow. An error is that of one run; the others have
        their tokens.
        """
        if self._threads is None or len(work) < MIN_PARALLEL:
            return [self._draw(*pair) for pair in work]
        # The first look at a batch's logits puts them in order, so it has to be alone.
        first = self._draw(*work[0])
        parts = [work[1:][i :: self._n_threads + 1] for i in range(self._n_threads + 1)]
        others = [self._threads.submit(self._draw_all, part) for part in parts[1:]]
        drawn = [self._draw_all(parts[0]), *(other.result() for other in others)]
        results: list[list[Draw] | TrioServeError] = [first] * len(work)
        for i, part in enumerate(drawn):
            results[1 + i :: self._n_threads + 1] = part
        return results

    def close(self) -> None:
        """End the threads. They have nothing to do between two ticks."""
        if self._threads is not None:
            self._threads.shutdown()

    def _draw_all(self, work: Sequence[tuple[Run, int]]) -> list[list[Draw] | TrioServeError]:
        return [self._draw(run, row) for run, row in work]

    def _draw(self, run: Run, row: int) -> list[Draw] | TrioServeError:
        sampler, params, draft = run.sampler, run.task.params, run.draft
        assert sampler is not None
        draws: list[Draw] = []
        try:
            while True:
                if run.forced:
                    token = run.forced.popleft()
                    draw = Draw(token, _force(sampler, token, row, params))
                elif not params.n_probs:
                    draw = Draw(sampler.sample(row))
                else:
                    post = params.post_sampling_probs
                    draw = Draw(*sampler.sample_with_probs(row, params.n_probs, post=post))
                draws.append(draw)
                if len(draws) > len(draft) or draw.token != draft[len(draws) - 1]:
                    return draws
                if draw.token in self._ends:
                    return draws
                row += 1
        except TrioServeError as error:
            return error


def _force(
    sampler: Sampler, token: TokenId, row: int, params: GenerationParams
) -> TokenProbs | None:
    probs = None
    if params.n_probs:
        probs = sampler.probs(row, token, params.n_probs, post=params.post_sampling_probs)
    sampler.accept(token)
    return probs
