"""Outputs of a model are the same with drafts, whichever were right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.grammar_bench import Bench, schema
from tests.support.step_costs import FlatCosts
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import Drafter, DraftRequest, NgramDrafter, NgramRules
from trioserve.llama.backend import LlamaBackend
from trioserve.types import Finished, Grammar, SamplingParams

STORY = "One day, Tom saw a red ball. Tom said: give me the red ball. One day, Tom saw a"

RECORDS = schema(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "color_of_the_ball": {"enum": ["red", "green"]},
                "is_new": {"type": "boolean"},
            },
            "required": ["color_of_the_ball", "is_new"],
            "additionalProperties": False,
        },
        "minItems": 4,
        "maxItems": 4,
    }
)


class WrongAfterTwo(NgramDrafter):
    """Guesses from n-grams, with a wrong third token."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        return [
            [*guess[:2], 5, *guess[3:]][: one.n_max]
            for one, guess in zip(requests, super().propose(requests), strict=True)
        ]


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    config = Config(
        threads=1,
        ctx_size=2048,
        parallel=4,
        cache_type_k="f32",
        cache_type_v="f32",
        spec_type=("ngram-simple",),
    )
    with llama.load(config) as backend:
        yield backend


def run(backend: LlamaBackend, drafters: Sequence[Drafter], sampling: SamplingParams) -> Bench:
    bench = Bench(backend)
    bench.engine.drafts.use(drafters)
    bench.engine.drafts.costs = FlatCosts()
    options: list[tuple[Grammar | None, str, dict[str, Any]]] = [
        (None, STORY, {"max_tokens": 60}),
        (RECORDS, STORY, {"max_tokens": 150}),
        (None, STORY + " ball.", {"n_probs": 3, "max_tokens": 40}),
        (None, STORY + " red", {"stop": ("the", "They"), "max_tokens": 60}),
    ]
    for i, (grammar, prompt, more) in enumerate(options):
        bench.submit(i, grammar, prompt, sampling=sampling, **more)
    while bench.step():
        bench.engine.check_integrity()
    return bench


GREEDY = SamplingParams(temperature=0.0)
#: With a memory of the output, and without chance: the shape of a batch changes the rounding.
FORGETFUL = SamplingParams(temperature=0.0, frequency_penalty=0.2, repeat_penalty=1.1)


@pytest.mark.parametrize(
    ("sampling", "drafter"), [(GREEDY, NgramDrafter), (FORGETFUL, WrongAfterTwo)]
)
def test_the_same_with_and_without_drafts(
    backend: LlamaBackend, sampling: SamplingParams, drafter: type[NgramDrafter]
) -> None:
    plain = run(backend, [], sampling)
    rules = NgramRules(name="ngram-mod", n=2, n_max=8, shared=True)
    drafted = run(backend, [drafter(rules)], sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert len(json.loads(plain.text[1])) == 4
    ends = [end for end in drafted.ends.values() if isinstance(end, Finished)]
    assert [end.reason for end in ends] == [plain.reason(i) for i in drafted.ends]
    n_right = sum(end.timings.draft_n_accepted for end in ends)
    assert 0 < n_right < sum(end.timings.draft_n for end in ends)
    for one, other in zip(plain.probs[2], drafted.probs[2], strict=True):
        assert one.chosen.id == other.chosen.id
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=0.05)
