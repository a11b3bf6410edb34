"""Drafts: several tokens in a step, and what was not accepted is rolled back."""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness
from trioserve.engine.rollback import Rollback
from trioserve.engine.slot import Slot
from trioserve.errors import KVCacheFullError
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import EOS
from trioserve.types import Chunk, FinishReason


def start(backend: ScriptedBackend | None = None, **params: object) -> tuple[Harness, Slot]:
    """Begin an output of ``HELLO WORLD``; its first token is there."""
    harness = Harness(backend)
    harness.submit(1, "hello world", **params)
    harness.step()
    assert harness.text(1) in ("H", "")  # a stop string may hold it back
    return harness, harness.engine._scheduler.slots[0]


def propose(harness: Harness, slot: Slot, draft: str | list[int]) -> None:
    tokens = draft.encode() if isinstance(draft, str) else draft
    harness.engine._scheduler.propose([(slot, tuple(tokens))])
    harness.engine.check_integrity()


@pytest.mark.parametrize(
    ("draft", "text"),
    [
        ("", "HE"),
        ("x", "HE"),
        ("E", "HEL"),
        ("ELLO", "HELLO "),
        ("ELxO", "HELL"),
        ("ELLO WORLD", "HELLO WORLD"),
    ],
)
def test_a_step_adds_what_is_right_of_a_draft_and_one_more(draft: str, text: str) -> None:
    harness, slot = start()
    before = harness.backend.n_decodes
    propose(harness, slot, draft)
    harness.step()
    assert harness.backend.n_decodes == before + 1
    assert harness.text(1) == text
    if slot.request is not None:
        held = bytes(harness.backend.sequences[0]).decode()
        assert held == "hello world" + text[:-1]  # the newest token is still to be decoded
        assert slot.request.draft == []
    harness.run()
    assert harness.text(1) == "HELLO WORLD"
    assert harness.finish(1).timings.predicted_n == 12  # the end token counts


def test_tokens_of_a_step_leave_as_one_chunk_with_their_probabilities() -> None:
    harness, slot = start(n_probs=1)
    propose(harness, slot, "ELLx")
    harness.step()
    chunk = harness.events[1][-1]
    assert isinstance(chunk, Chunk)
    assert chunk.tokens == tuple(b"ELLO")
    assert [probs.chosen.id for probs in chunk.probs] == list(b"ELLO")


def test_nothing_is_sampled_after_the_end_that_a_draft_holds() -> None:
    harness, slot = start()
    propose(harness, slot, [*b"ELLO WORLD", EOS, *b"beyond"])
    assert not harness.step()
    assert harness.text(1) == "HELLO WORLD"
    assert harness.finish(1).reason is FinishReason.EOS
    assert bytes(harness.backend.sequences[0]) == b"hello worldHELLO WORLD"


@pytest.mark.parametrize("draft", ["", "E", "ELLO", "ELLO WORLD"])
def test_a_stop_string_over_the_border_of_steps(draft: str) -> None:
    harness, slot = start(stop=("HELLO W",))
    propose(harness, slot, draft)
    harness.run()
    finished = harness.finish(1)
    assert harness.text(1) == ""
    assert (finished.reason, finished.stopping_word) == (FinishReason.WORD, "HELLO W")
    assert finished.timings.predicted_n == 7


def test_the_limit_of_tokens_holds_within_a_draft() -> None:
    harness, slot = start(max_tokens=4)
    propose(harness, slot, "ELLO WORLD")
    assert not harness.step()
    assert harness.text(1) == "HELL"
    assert harness.finish(1).reason is FinishReason.LIMIT
    assert harness.finish(1).timings.predicted_n == 4
    # The right tokens stay for later prompts.
    assert bytes(harness.backend.sequences[0]) == b"hello worldHELL"


def test_drafts_that_are_given_together_are_cut_from_the_last() -> None:
    backend = ScriptedBackend(n_slots=4)
    backend.n_outputs = 12
    harness, slot = start(backend)
    harness.submit(2, "other text")
    harness.submit(3, "third one")
    harness.step()
    scheduler = harness.engine._scheduler
    others = scheduler.slots[1:3]
    assert scheduler.rows_for_drafts() == 8
    assert scheduler.propose([(slot, b"LLO W"), (others[0], b"THER T"), (others[1], b"HI")]) == 8
    assert [each.n_pending - 1 for each in scheduler.slots[:3]] == [5, 3, 0]
    assert scheduler.rows_for_drafts() == 0
    assert scheduler.propose([(slot, b"LL"), (others[1], b"HIRD ONE")]) == 0  # one gives three
    assert [each.n_pending - 1 for each in scheduler.slots[:3]] == [2, 3, 3]
    harness.run()
    texts = [harness.text(task_id) for task_id in (1, 2, 3)]
    assert texts == ["HELLO WORLD", "OTHER TEXT", "THIRD ONE"]


def test_a_draft_ends_where_the_sequence_does() -> None:
    harness, slot = start(ScriptedBackend(n_slots=1, n_ctx=15))
    propose(harness, slot, "ELLO WORLD")
    assert slot.n_pending == 3
    assert not harness.step()
    assert harness.text(1) == "HELL"
    assert harness.finish(1).truncated


def test_a_state_that_goes_back_by_a_few_tokens() -> None:
    harness, slot = start(ScriptedBackend(can_cut=False, rollback=Rollback(n_max=3)))
    propose(harness, slot, "EXLO WORLD")
    assert slot.n_pending == 4
    harness.step()
    assert harness.text(1) == "HEL"
    assert bytes(harness.backend.sequences[0]) == b"hello worldHE"
    harness.run()
    assert harness.text(1) == "HELLO WORLD"


def test_a_state_from_before_is_followed_by_what_was_right() -> None:
    rollback = Rollback(n_max=8, needs_state=True)
    harness, slot = start(ScriptedBackend(can_cut=False, rollback=rollback))
    for draft, text, n_ahead in (
        ("ELxO", "HELL", 3),
        ("Ox", "HELLO ", 5),
        ("WOR", "HELLO WORL", 0),
    ):
        propose(harness, slot, draft)
        harness.step()
        assert harness.text(1) == text
        assert slot.request is not None and slot.request.n_ahead == n_ahead
    harness.run()
    assert harness.text(1) == "HELLO WORLD"


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_sequence_that_cannot_go_back_is_computed_again(succeeds: bool) -> None:
    rollback = Rollback(n_max=8, needs_state=True)
    harness, slot = start(ScriptedBackend(can_cut=False, rollback=rollback))
    harness.backend.on_rewind = lambda: succeeds
    propose(harness, slot, "ELxO")
    harness.step()
    assert slot.in_decode == succeeds
    assert bytes(harness.backend.sequences[0]) == (b"hello world" if succeeds else b"")
    harness.run()
    assert harness.text(1) == "HELLO WORLD"


def test_drafts_of_one_length_before_one_prompt() -> None:
    """The backend asserts it."""
    rollback = Rollback(n_max=4, n_together=20)
    backend = ScriptedBackend(n_slots=6, n_ctx=2048, can_cut=False, rollback=rollback)
    harness = Harness(backend)
    texts = ["hello world", "other text", "a third one", "x" * 300, "y" * 200, "short"]
    for i, text in enumerate(texts[:3]):
        harness.submit(i, text)
    harness.step()
    harness.submit(3, texts[3])
    harness.submit(4, texts[4])
    harness.submit(5, texts[5], draft_max=0)
    scheduler = harness.engine._scheduler
    while harness.engine._scheduler.has_work:
        guesses = []
        for slot in scheduler.slots:
            if (one := slot.request) is not None and slot.in_decode:
                rest = one.task.prompt.tokens[one.n_output :]
                guesses.append((slot, bytes(rest[: slot.id]).decode().upper().encode()))
        scheduler.propose(guesses)
        scheduler.even_out()
        drafts = [one.draft for slot in scheduler.slots if (one := slot.request) and one.draft]
        lengths = set(map(len, drafts))
        assert len(lengths) <= 1
        harness.step()
    assert [harness.text(i) for i in range(6)] == [text.upper() for text in texts]
    timings = [harness.finish(i).timings for i in range(6)]
    assert sum(one.draft_n_accepted for one in timings) == sum(one.draft_n for one in timings) > 10


def test_drafts_give_way_before_a_run_does() -> None:
    harness = Harness(ScriptedBackend(n_slots=2, n_ctx=26))
    for task_id, prompt in enumerate(("hello wo", "other"), 1):
        harness.submit(task_id, prompt, max_tokens=6)
    harness.step()
    one, other = harness.engine._scheduler.slots
    propose(harness, one, "ELLO WO")
    propose(harness, other, "THERxxxxx")
    harness.step()
    assert one.request is not None and other.request is not None
    assert (harness.text(1), harness.text(2)) == ("HE", "OT")
    harness.run()
    assert (harness.text(1), harness.text(2)) == ("HELLO ", "OTHER")


def test_a_cache_that_is_full_after_all_drops_the_draft() -> None:
    harness, slot = start()
    propose(harness, slot, "ELLO")
    harness.backend.fail_next = KVCacheFullError("no free cells")
    harness.step()
    assert slot.request is not None and slot.n_pending == 1
    harness.run()
    assert harness.text(1) == "HELLO WORLD"
