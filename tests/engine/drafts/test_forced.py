"""Tokens that a grammar forces: they join the output at once, and the next step decodes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engine.drafts.test_drafts import ScriptedDrafter, rest_of
from tests.support.engine_harness import Harness
from tests.support.step_costs import FlatCosts
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import ScriptedConstraint
from trioserve.types import FinishReason, GenerationParams, Grammar, Prompt, Task

ANYTHING = ScriptedConstraint(Grammar("regex", ".*"))


def start(
    forced: Sequence[int], drafter: ScriptedDrafter | None = None, **options: object
) -> Harness:
    """Begin an output of ``HELLO WORLD``; `forced` tokens follow each length of it."""
    drafters = [drafter] if drafter is not None else []
    backend = ScriptedBackend(n_slots=2, drafters=drafters)
    backend.n_outputs = 16
    backend.n_forced = lambda said: dict(enumerate(forced)).get(len(said), 0)
    harness = Harness(backend)
    harness.engine.drafts.costs = FlatCosts()
    params = GenerationParams(**options)
    harness.engine.submit(Task(1, Prompt(b"hello world"), params, constraint=ANYTHING))
    harness.step()
    return harness


def texts(harness: Harness) -> list[str]:
    """Run to the end; returns the output after each step."""
    said = [harness.text(1)]
    while harness.step():
        said.append(harness.text(1))
    assert harness.text(1) == "HELLO WORLD"
    assert harness.finish(1).reason is FinishReason.EOS
    return said


def test_forced_tokens_leave_with_the_token_that_forces_them() -> None:
    harness = start([0, 3, 0, 0, 0, 0, 2])
    n_rows: list[int] = []
    harness.backend.on_decode = lambda backend: n_rows.append(len(backend.batch.rows))
    said = texts(harness)
    assert said == ["HELL", "HELLO", "HELLO WO", "HELLO WOR", "HELLO WORL", "HELLO WORLD"]
    assert n_rows == [4, 1, 3, 1, 1, 1]
    timings = harness.finish(1).timings
    assert (timings.predicted_n, timings.draft_n) == (12, 0)


def test_forced_tokens_that_a_draft_has_are_decoded_with_it() -> None:
    harness = start([0, 0, 3], ScriptedDrafter(rest_of))
    harness.step()
    assert harness.text(1) == "HELLO WOR"  # all that the draft had, and one more
    assert harness.backend.n_decodes == 2
    assert texts(harness)[-1] == "HELLO WOR"  # what ends the run comes with the last step


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5])
def test_the_limit_of_tokens_holds_within_forced_ones(max_tokens: int) -> None:
    harness = start([0, 3, 0, 0, 0, 0], max_tokens=max_tokens)
    harness.run()
    assert harness.text(1) == "HELLO"[:max_tokens]
    assert harness.finish(1).reason is FinishReason.LIMIT


def test_a_stop_string_within_forced_tokens() -> None:
    harness = start([0, 3], stop=("LL",))
    assert harness.text(1) == "HE"
    assert harness.finish(1).stopping_word == "LL"


def test_tokens_with_probabilities_are_sampled_one_by_one() -> None:
    assert texts(start([0, 3], n_probs=1))[:2] == ["H", "HE"]


def test_a_text_of_forced_tokens_ends_with_its_context() -> None:
    backend = ScriptedBackend(n_slots=1, n_ctx=14)
    backend.n_outputs = 8
    backend.n_forced = lambda said: 10
    harness = Harness(backend)
    harness.engine.submit(Task(1, Prompt(b"hello world"), constraint=ANYTHING))
    harness.run()
    assert harness.text(1) == "HEL"
    assert harness.finish(1).truncated
