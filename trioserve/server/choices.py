"""Several outputs of one prompt: all run at the same time, each as a task of its own."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import attrs
import trio

from trioserve.errors import InvalidRequestError, TrioServeError
from trioserve.server.stream import Completion
from trioserve.types import GenerationParams

_T = TypeVar("_T")

#: Stands for a seed that is drawn anew for each output, as -1 does.
RANDOM_SEED = 2**32 - 1


def check_copies(n: int, n_slots: int, *, param: str = "n") -> None:
    """Refuse more outputs of a prompt than can run at the same time.

    Raises:
        InvalidRequestError: there are fewer slots.
    """
    if n > n_slots:
        raise InvalidRequestError(
            f"'{param}' must be between 1 and {n_slots}, the number of slots.", param=param
        )


def copies_of(params: GenerationParams, n: int) -> list[GenerationParams]:
    """Make the parameters of `n` outputs of one prompt: a seed counts up, as in llama-server.

    Only the first may have a slot of its choice.
    """
    seed = params.sampling.seed
    copies = [params]
    for i in range(1, n):
        sampling = params.sampling
        if seed not in (-1, RANDOM_SEED):
            sampling = attrs.evolve(sampling, seed=(seed + i) % 2**32)
        copies.append(attrs.evolve(params, sampling=sampling, id_slot=-1))
    return copies


def best_of(outputs: Sequence[Completion], n_copies: int, n: int) -> list[Completion]:
    """Keep, of the outputs of each prompt, the `n` whose tokens are most probable on average.

    Those of one prompt stand together, `n_copies` of them. They need `n_probs`.
    """
    if n_copies == n:
        return list(outputs)
    best = []
    for start in range(0, len(outputs), n_copies):
        best += sorted(outputs[start : start + n_copies], key=_mean_logprob, reverse=True)[:n]
    return best


def _mean_logprob(output: Completion) -> float:
    logprobs = [each.chosen.logprob for each in output.probs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


async def all_of(calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Make calls at the same time, and return what they return.

    Raises:
        TrioServeError: one of them failed; the others are cancelled.
    """
    if len(calls) == 1:
        return [await calls[0]()]
    results: dict[int, _T] = {}
    failures: list[TrioServeError] = []

    async def make(index: int, call: Callable[[], Awaitable[_T]]) -> None:
        try:
            results[index] = await call()
        except TrioServeError as error:
            failures.append(error)  # raised below, outside of the nursery's group
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(make, index, call)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(calls))]
