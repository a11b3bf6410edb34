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
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._threads = ThreadPoolExecutor(n_threads, "trioserve-sampler") if n_threads else None

    def draw(self, work: Sequence[tuple[Run, int]]) -> list[Draw | TrioServeError]:
        """Sample a token for each pair of a run and its row of logits.

        An error is that of one run; the others have their tokens.
        """
        if self._threads is None or len(work) < MIN_PARALLEL:
            return [_draw(*pair) for pair in work]
        # The first look at a batch's logits puts them in order, so it has to be alone.
        first = _draw(*work[0])
        parts = [work[1:][i :: self._n_threads + 1] for i in range(self._n_threads + 1)]
        others = [self._threads.submit(_draw_all, part) for part in parts[1:]]
        drawn = [_draw_all(parts[0]), *(other.result() for other in others)]
        results: list[Draw | TrioServeError] = [first] * len(work)
        for i, part in enumerate(drawn):
            results[1 + i :: self._n_threads + 1] = part
        return results

    def close(self) -> None:
        """End the threads. They have nothing to do between two ticks."""
        if self._threads is not None:
            self._threads.shutdown()


def _draw_all(work: Sequence[tuple[Run, int]]) -> list[Draw | TrioServeError]:
    return [_draw(run, row) for run, row in work]


def _draw(run: Run, row: int) -> Draw | TrioServeError:
    assert run.sampler is not None
    params = run.task.params
    try:
        if run.forced:
            token = run.forced.popleft()
            return Draw(token, _force(run.sampler, token, row, params))
        if not params.n_probs:
            return Draw(run.sampler.sample(row))
        token, probs = run.sampler.sample_with_probs(
            row, params.n_probs, post=params.post_sampling_probs
        )
        return Draw(token, probs)
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
