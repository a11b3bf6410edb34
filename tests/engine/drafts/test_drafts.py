"""The choice of a drafter, the lengths of drafts, and the lessons from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from tests.support.engine_harness import Harness
from tests.support.step_costs import FlatCosts, HalfSteepCosts, SteepCosts
from trioserve.engine import DraftRequest
from trioserve.engine.drafts import drafts
from trioserve.engine.step_costs import StepCosts
from trioserve.testing import ScriptedBackend
from trioserve.types import CellKey, Chunk, DraftCounts, EngineStatus, TokenId


@pytest.fixture(autouse=True)
def asking_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters are asked as often on a busy machine."""
    monkeypatch.setattr(drafts, "perf_counter", lambda: 0.0)


class ScriptedDrafter:
    """Makes scripted guesses, and notes the calls."""

    name = "scripted"
    step_s = 0.0
    n_max = 64

    def __init__(self, guess: Callable[[str], str], *, is_free: bool = True) -> None:
        self.guess = guess
        self.is_free = is_free
        self.asked: list[tuple[int, str, int]] = []  # slot, text, the most tokens
        self.forgotten: list[int] = []
        self.closed = False
        self.pays = True
        self.n_behind = 0  # steps until it has caught up

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[TokenId] | None]:
        self.asked += [(one.slot_id, text_of(one.keys), one.n_max) for one in requests]
        if self.n_behind:
            self.n_behind -= 1
            return [None] * len(requests)
        return [tuple(self.guess(text_of(one.keys)).encode())[: one.n_max] for one in requests]

    def forget(self, slot_id: int) -> None:
        self.forgotten.append(slot_id)

    def close(self) -> None:
        self.closed = True


def text_of(keys: Sequence[CellKey]) -> str:
    return bytes(keys).decode()


def rest_of(text: str) -> str:
    """The rest of an output in capitals, if the prompt was ``hello world``."""
    return "HELLO WORLD"[len(text) - 11 :]


def start(
    *drafters: ScriptedDrafter,
    costs: StepCosts | None = None,
    context_shift: bool = False,
    **options: int,
) -> Harness:
    backend = ScriptedBackend(drafters=drafters, **options)
    harness = Harness(backend, context_shift=context_shift)
    harness.engine.drafts.costs = costs or FlatCosts()
    return harness


def test_a_free_drafter_is_asked_when_its_last_guess_was_used_up_or_wrong() -> None:
    drafter = ScriptedDrafter(lambda text: {12: "ExL", 14: "LO"}.get(len(text), ""))
    harness = start(drafter)
    harness.submit(1, "hello world")
    harness.step()
    harness.step()
    assert harness.text(1) == "HEL"
    harness.step()
    assert harness.text(1) == "HELLO "
    assert [text for _, text, _ in drafter.asked] == ["hello worldH", "hello worldHEL"]
    harness.run()
    assert harness.text(1) == "HELLO WORLD"
    timings = harness.finish(1).timings
    assert (timings.draft_n, timings.draft_n_accepted) == (5, 3)
    told = [event.drafts for event in harness.events[1] if isinstance(event, Chunk)]
    assert [drafts for drafts in told if any(drafts)] == [(3, 1), (5, 3), (5, 3)]


def test_a_drafter_forgets_a_slot_whose_run_is_another_one() -> None:
    drafter = ScriptedDrafter(lambda text: "")
    harness = start(drafter)
    harness.complete(1, "hello")
    harness.complete(2, "next")
    assert drafter.forgotten == [0]
    harness.engine.stop()
    harness.engine.run()
    assert drafter.closed


def test_the_next_drafter_is_asked_where_the_first_has_no_guess() -> None:
    first = ScriptedDrafter(lambda text: rest_of(text) if "world" in text else "")
    second = ScriptedDrafter(lambda text: "x", is_free=False)
    harness = start(first, second)
    harness.submit(1, "hello world")
    harness.complete(2, "other")
    assert (harness.text(1), harness.text(2)) == ("HELLO WORLD", "OTHER")
    assert {slot_id for slot_id, _, _ in first.asked} == {0, 1}
    assert {slot_id for slot_id, _, _ in second.asked} == {1}


def test_drafts_are_counted_by_their_drafter() -> None:
    first = ScriptedDrafter(lambda text: rest_of(text) if "world" in text else "")
    second = ScriptedDrafter(lambda text: "x", is_free=False)
    first.name, second.name = "ngram-mod", "draft-mtp"
    harness = start(first, second)
    assert harness.engine.status().drafts == (DraftCounts("ngram-mod"), DraftCounts("draft-mtp"))
    harness.submit(1, "hello world")
    harness.complete(2, "other")
    good, bad = status = harness.engine.status().drafts
    assert 0 < good.checked < good.tokens == good.accepted
    assert bad.checked == bad.tokens > 0 == bad.accepted
    counters = harness.engine.status().counters
    assert counters.drafts == sum(one.checked for one in status)
    assert counters.draft_tokens == sum(one.tokens for one in status)
    assert counters.accepted_tokens == good.accepted
    assert start().engine.status().drafts == ()
    earlier = EngineStatus(slots=(), waiting=(), drafts=status)
    now, _ = harness.engine.status().after(earlier).drafts
    assert now == DraftCounts("ngram-mod", 2 * good.checked, 2 * good.tokens, 2 * good.accepted)


def test_while_drafts_have_lost_more_than_they_brought_nothing_is_drafted() -> None:
    harness = start(ScriptedDrafter(rest_of))
    harness.engine.drafts._balance.add(0, 1, 100.0)
    harness.submit(1, "hello world")
    harness.submit(2, "hello world")
    harness.run()
    assert harness.text(1) == harness.text(2) == "HELLO WORLD"
    assert harness.finish(1).timings.draft_n == 0


def test_a_free_drafter_is_watched_while_rows_are_expensive() -> None:
    drafter = ScriptedDrafter(rest_of)
    harness = start(drafter, costs=SteepCosts())
    harness.submit(1, "hello world")
    n_rows = []
    harness.backend.on_decode = lambda backend: n_rows.append(len(backend.batch.rows))
    harness.run()
    assert harness.text(1) == "HELLO WORLD"
    assert set(n_rows[1:]) == {1}
    assert len(drafter.asked) == 2  # once it was right, and at the end


def test_a_drafter_that_takes_time_is_asked_less_and_less_often_where_it_does_not_pay() -> None:
    drafter = ScriptedDrafter(lambda text: "?", is_free=False)
    harness = start(drafter, n_ctx=4096, costs=HalfSteepCosts())
    harness.complete(1, "x" * 500)
    lengths = [len(text) - 500 for _, text, _ in drafter.asked]
    gaps = [b - a for a, b in itertools.pairwise(lengths)]
    assert gaps == [2, 3, 5, 9, 17, 33, 65, 129]


def test_a_slow_drafter_is_not_asked_if_good_guesses_would_not_pay() -> None:
    drafter = ScriptedDrafter(rest_of, is_free=False)
    harness = start(drafter, costs=SteepCosts())
    harness.complete(1, "hello world")
    assert harness.text(1) == "HELLO WORLD"
    assert not drafter.asked


@pytest.mark.parametrize("pays", [True, False])
def test_a_drafter_knows_whether_drafts_pay(pays: bool) -> None:
    drafter = ScriptedDrafter(rest_of, is_free=False)
    harness = start(drafter, costs=FlatCosts() if pays else SteepCosts())
    harness.submit(1, "hello world")
    harness.step()  # the prompt
    assert drafter.pays == pays
    drafter.pays = not pays
    harness.run()
    assert drafter.pays == pays


def test_a_drafter_that_catches_up_is_asked_again_in_the_next_step() -> None:
    drafter = ScriptedDrafter(lambda text: "?", is_free=False)
    harness = start(drafter, n_ctx=4096, costs=HalfSteepCosts())
    harness.submit(1, "x" * 200)
    while len(drafter.asked) < 4:
        harness.step()
    n_asked, drafter.n_behind = len(drafter.asked), 3
    while drafter.n_behind:
        harness.step()
    harness.step()
    lengths = [len(text) for _, text, _ in drafter.asked[n_asked:]]
    assert [b - a for a, b in itertools.pairwise(lengths)] == [1, 1, 1]


def test_steps_repeat_until_a_drafter_is_asked_again() -> None:
    drafter = ScriptedDrafter(lambda text: "?", is_free=False)
    harness = start(drafter, n_ctx=4096, costs=HalfSteepCosts())
    harness.submit(1, "x" * 500)
    proposals, propose = [], harness.engine.drafts.propose
    harness.engine.drafts.propose = lambda: (proposals.append(1), propose())  # type: ignore
    harness.run()
    assert len(drafter.asked) < len(proposals) < 500 // 8


def test_a_new_request_does_not_try_again_what_did_not_pay() -> None:
    drafter = ScriptedDrafter(lambda text: "?", is_free=False)
    harness = start(drafter, n_ctx=4096, costs=HalfSteepCosts())
    n_asked = []
    for task_id in (1, 2, 3):
        harness.submit(task_id, "x" * 100)
        harness.run()
        n_asked.append(len(drafter.asked) - sum(n_asked))
    assert n_asked[0] > 4
    assert max(n_asked[1:]) <= 2
    assert {n_max for _, _, n_max in drafter.asked} == {5}


def test_a_new_request_starts_with_the_acceptance_of_the_last_ones() -> None:
    drafter = ScriptedDrafter(lambda text: text.upper()[-1:] * 64, is_free=False)
    harness = start(drafter, n_ctx=4096)
    for task_id in (1, 2):
        harness.complete(task_id, "x" * 100, max_tokens=60)
    first, second = (n_max for _, text, n_max in drafter.asked if len(text) == 101)
    assert second > 3 * first


def test_a_shift_of_the_context_is_another_text() -> None:
    drafter = ScriptedDrafter(lambda text: text.upper()[-3:])
    harness = start(drafter, n_ctx=32, context_shift=True)
    harness.complete(1, "a" * 20, max_tokens=30)
    assert harness.finish(1).timings.predicted_n == 21
    assert drafter.forgotten


@pytest.mark.parametrize(("draft_max", "n_drafted"), [(-1, 9), (0, 0), (4, 8)])
def test_a_request_says_how_long_its_drafts_may_be(draft_max: int, n_drafted: int) -> None:
    harness = start(ScriptedDrafter(rest_of))
    harness.complete(1, "hello world", draft_max=draft_max)
    assert harness.text(1) == "HELLO WORLD"
    assert harness.finish(1).timings.draft_n == n_drafted
    counters = harness.engine.status().counters
    assert (counters.draft_tokens, counters.accepted_tokens) == (n_drafted, n_drafted)
    assert bool(counters.drafts) == bool(n_drafted)


def test_slots_say_whether_they_may_have_drafts() -> None:
    assert all(slot.speculative for slot in start(ScriptedDrafter(rest_of)).engine.status().slots)
    for harness in (start(), start(ScriptedDrafter(rest_of), can_cut=False)):
        assert not any(slot.speculative for slot in harness.engine.status().slots)
