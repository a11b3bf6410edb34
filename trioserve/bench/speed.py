"""Measures the speed of servers: of prompts and of generation, at a depth, for several clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from trioserve.bench.client import Answer, Server
from trioserve.bench.stats import percentile
from trioserve.concurrency import all_of

#: Tokens of the prompt before a generation.
_SHORT = 16


@attrs.frozen(kw_only=True)
class Workload:
    """Either a prompt of `n_prompt` tokens or an output of `n_gen` tokens, of each client.

    Before that, `depth` tokens are in the KV cache, which are not measured.
    """

    n_prompt: int = 0
    n_gen: int = 0
    depth: int = 0
    clients: int = 1

    @property
    def name(self) -> str:
        """As in llama-bench, such as "tg128 @ d4096"."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.depth}" if self.depth else name


def workloads_of(
    n_prompts: Sequence[int], n_gens: Sequence[int], depths: Sequence[int], clients: Sequence[int]
) -> list[Workload]:
    """Combine all values, as llama-bench does; a length of 0 leaves its tests out."""
    return [
        test
        for depth, count in itertools.product(depths, clients)
        for test in (
            *(Workload(n_prompt=n, depth=depth, clients=count) for n in n_prompts if n),
            *(Workload(n_gen=n, depth=depth, clients=count) for n in n_gens if n),
        )
    ]


@attrs.frozen(kw_only=True)
class Sample:
    """One run of a test. Times are in milliseconds; `itl_p50` and `itl_p99` are of generation."""

    tokens_per_s: float
    ttft: float
    itl_p50: float | None = None
    itl_p99: float | None = None
    n_tokens: int = 0  # that were computed, of all clients
    notes: tuple[str, ...] = ()


async def measure(server: Server, test: Workload, seed: str) -> Sample:
    """Run a test once. The seed must be new. Raises TrioServeError: a request has failed."""
    names, n_new = [f"{seed} {client}" for client in range(test.clients)], test.n_prompt or _SHORT
    held = [server.prompt(test.depth, f"{name} depth") for name in names]
    if test.depth:
        await all_of([partial(server.complete, prompt, 1) for prompt in held])
    new = [server.prompt(n_new, f"{name} new") for name in names]
    prompts = [f"{a} {b}" for a, b in zip(held, new, strict=True)] if test.depth else new
    calls = [partial(server.complete, prompt, test.n_gen or 1) for prompt in prompts]
    return sample_of(test, await all_of(calls))


async def measure_repetition(server: Server, n_tokens: int, seed: str) -> float:
    """Measure how many tokens a second an output has if its prompt asks for the same text again.

    Drafts from the text so far are right where the model repeats it.

    Raises:
        TrioServeError: the request has failed.
    """
    text = server.prompt(n_tokens, f"{seed} again")
    begun = text[: len(text) // 4].rpartition(" ")[0]
    answer = await server.complete(f"{text}\n{text}\n{begun}", n_tokens)
    return (answer.n_tokens - 1) / _duration([answer])


def sample_of(test: Workload, answers: Sequence[Answer]) -> Sample:
    """Sum up the answers of all clients."""
    notes = cache_notes(test, answers)
    if test.n_gen and any(one.n_tokens < test.n_gen for one in answers):
        notes.append(f"outputs are shorter than {test.n_gen} tokens")
    if test.n_prompt:
        counts = [n_computed(test, one) for one in answers]
        seconds = max(one.times[0] for one in answers) - min(one.sent for one in answers)
    else:
        counts = [one.n_tokens - 1 for one in answers]  # the first one came with the prompt
        seconds = _duration(answers)
    gaps = [gap * 1e3 for one in answers for gap in one.gaps]
    return Sample(
        tokens_per_s=sum(counts) / seconds,
        ttft=percentile([one.ttft * 1e3 for one in answers], 0.5),
        itl_p50=percentile(gaps, 0.5) if gaps else None,
        itl_p99=percentile(gaps, 0.99) if gaps else None,
        n_tokens=sum(counts),
        notes=tuple(notes),
    )


def _duration(answers: Sequence[Answer]) -> float:
    """Seconds from the first text of all answers to the last, or from the request if all is one."""
    first, last = min(one.times[0] for one in answers), max(one.times[-1] for one in answers)
    return (last - first) or (last - min(one.sent for one in answers))


def cache_notes(test: Workload, answers: Sequence[Answer]) -> list[str]:
    """Say where the tokens of the depth may have been computed again."""
    if not test.depth:
        return []
    cached = [one.n_cached for one in answers if one.n_cached is not None]
    if len(cached) < len(answers):
        return ["the server does not report how much of a prompt was cached"]
    if sum(cached) < test.clients * test.depth / 2:
        return ["less than half of the depth was in the cache"]
    return []


def n_computed(test: Workload, answer: Answer) -> int:
    """The number of tokens of a prompt that were computed, not found in the cache."""
    cached = test.depth if answer.n_cached is None else answer.n_cached
    return max(0, answer.n_prompt - cached)


async def interleave(
    servers: Sequence[Server], test: Workload, rounds: int, note: Callable[[str], None]
) -> dict[str, list[Sample]]:
    """Measure A B, B A, and so on; returns the samples of each server by its name.

    Raises:
        TrioServeError: a request has failed.
    """
    samples: dict[str, list[Sample]] = {server.name: [] for server in servers}
    for number in range(rounds):
        for server in servers if number % 2 == 0 else reversed(servers):
            note(f"{test.name}, {test.clients} at once, round {number + 1}: {server.name}")
            sample = await measure(server, test, f"{test.name} {test.clients} {number}")
            samples[server.name].append(sample)
    return samples
