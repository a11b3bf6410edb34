"""Sampled output with drafts has the probabilities that the model gives: a chi-square test.

The seeds are fixed, so the test always has the same result.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny_models
from tests.support.drafted import Drafted, Settings, load, without_head, write_head
from tests.support.llama_bench import Bench
from tests.support.oracle import Oracle
from tests.support.plain_loop import EXACT
from trioserve.engine import NgramDrafter, NgramRules
from trioserve.engine.backend import Sampler
from trioserve.engine.drafts import drafts
from trioserve.engine.output import SampledToken, SamplerPool
from trioserve.engine.slot import RequestState
from trioserve.llama.backend import LlamaBackend
from trioserve.types import SamplingParams

#: Requests; each one is a sample of the first three tokens.
N = 200
#: Tokens to choose from, at each place.
TOP_K = 4
#: The logits of these models are much further apart than those of trained ones.
TEMPERATURE = 4.0
#: The rarer outputs are counted together.
MIN_EXPECTED = 5.0
#: The quantile of the normal distribution for a probability of 0.001.
Z = 3.09

Output = tuple[int, ...]


class Reference:
    """A model without drafts, and what it computes for a text."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend
        self._ends = list(backend.vocab.end_of_generation)

    def next(self, text: list[int]) -> dict[int, float]:
        """Return the tokens that may come next, with their probabilities."""
        batch, n_vocab = self._backend.batch, self._backend.vocab.n_tokens
        batch.clear()
        row = batch.extend(text, 0, 0)
        batch.want_logits(row)
        self._backend.memory.remove(0, 0)
        self._backend.decode()
        logits = self._backend._context.logits(row, n_vocab).astype(np.float64)
        logits[self._ends] = -np.inf
        best = np.argsort(-logits)[:TOP_K]
        weights = np.exp((logits[best] - logits[best[0]]) / TEMPERATURE)
        return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))

    def outputs(self, text: list[int], n: int) -> dict[Output, float]:
        """Return the outputs of `n` tokens, with their probabilities."""
        if not n:
            return {(): 1.0}
        return {
            (token, *rest): prob * of_rest
            for token, prob in self.next(text).items()
            for rest, of_rest in self.outputs([*text, token], n - 1).items()
        }

    def repetitive(self, text: list[int]) -> list[int]:
        """Extend a text by what may follow its last token, each with its own best next one."""
        last = text[-1]
        for token in self.next(text):
            best, *_ = self.next([*text, token])
            text = [*text, token, best, last]
        return text


def chi_square(counts: Counter[Output], probs: dict[Output, float]) -> tuple[float, float]:
    """Compare samples with probabilities; returns the statistic, and what it exceeds in 1 of 1,000.

    An output that should be impossible counts as one of the rare ones.
    """
    expected = {output: N * prob for output, prob in probs.items() if N * prob >= MIN_EXPECTED}
    observed = {output: counts[output] for output in expected}
    pairs = [(observed[output], expected[output]) for output in expected]
    pairs.append((N - sum(observed.values()), N - sum(expected.values())))
    statistic = sum((n - mean) ** 2 / mean for n, mean in pairs)
    spread = 2 / (9 * (len(pairs) - 1))  # the approximation by Wilson and Hilferty
    return statistic, (len(pairs) - 1) * (1 - spread + Z * spread**0.5) ** 3


def start(kind: str, folder: Path) -> tuple[Bench, Settings]:
    """Make an engine with drafts of a kind; returns it, and its model's settings."""
    if kind == "recurrent":
        alone: Settings = {"model": str(tiny_models.write_generating(folder, "lfm2"))}
        alone |= {**EXACT, "parallel": 8, "ctx_size": 4096}
        return Bench(**alone, spec_type=("ngram-simple",)), alone
    settings = write_head(folder, kind if kind in ("dflash", "eagle3") else "glm4moe", is_good=True)
    settings |= {"parallel": 8, "ctx_size": 4096}
    alone = without_head(settings)
    if kind == "ngrams":
        bench = Bench(**alone, spec_type=("ngram-simple",))
        bench.engine.drafts.use([NgramDrafter(NgramRules(name="ngram-simple", n=2, n_max=8))])
    elif kind == "draft model":
        bench = Bench(**alone, spec_draft_model=alone["model"])
    else:
        bench = Drafted(settings)
    return bench, alone


def samples(bench: Bench, text: list[int]) -> Counter[Output]:
    """Count the first three tokens that many requests have said, of four: some have drafts."""
    counts: Counter[Output] = Counter()
    for first in range(0, N, 64):
        seeds = range(first, min(N, first + 64))
        for seed in seeds:
            sampling = SamplingParams(
                seed=seed,
                temperature=TEMPERATURE,
                top_k=TOP_K,
                top_p=1.0,
                min_p=0.0,
                ignore_eos=True,
            )
            bench.submit(seed, text, 4, sampling=sampling)
        bench.run()
        counts.update(tuple(bench.tokens.pop(seed)[:3]) for seed in seeds)
    return counts


def always_accept(
    _pool: SamplerPool, request: RequestState, sampler: Sampler, row: int
) -> list[SampledToken]:
    """Accept every guess without a look at the logits."""
    for token in request.draft:
        sampler.accept(token)
    last = sampler.sample(row + len(request.draft))
    return [*map(SampledToken, request.draft), SampledToken(last)]


@pytest.mark.parametrize(
    "kind", ["glm4moe", "eagle3", "dflash", "ngrams", "draft model", "recurrent"]
)
def test_outputs_have_the_probabilities_of_the_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each request has as many guesses as there is room for, although that does not pay.
    monkeypatch.setattr(drafts, "share_rows", lambda limits, *_, **__: list(limits))
    monkeypatch.setattr(drafts.Balance, "is_good", True)
    bench, alone = start(kind, tmp_path)
    with load(alone, parallel=1) as backend, bench.backend:
        reference = Reference(backend)
        text = list(backend.vocab.tokenize("Once upon a time"))
        if kind == "ngrams":
            text = reference.repetitive(text)
        probs = reference.outputs(text, 3)
        assert sum(probs.values()) == pytest.approx(1.0)
        if kind == "recurrent":
            best = sorted(probs, key=lambda output: -probs[output])
            bench.engine.drafts.use([Oracle([[*text, *output] for output in best])])
        statistic, critical = chi_square(samples(bench, text), probs)
        assert statistic < critical
        timings = [end.timings for end in bench.finished.values()]
        n_drafted = sum(one.draft_n for one in timings)
        n_accepted = sum(one.draft_n_accepted for one in timings)
        assert N / 20 < n_accepted < n_drafted - N / 20

        # If guesses are not checked, the test fails.
        monkeypatch.setattr(SamplerPool, "_sample_several", always_accept)
        statistic, critical = chi_square(samples(bench, text), probs)
        assert statistic > 2 * critical
