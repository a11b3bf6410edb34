"""Memory that cannot be cut: where prompts part, a later one starts from there."""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness
from trioserve.engine import CheckpointRules
from trioserve.testing import ScriptedBackend
from trioserve.types import CacheRoot, Preempted, Prompt

SYSTEM = "s" * 200
USER = SYSTEM + "U" + "u" * 60
ASKED = USER + "A"  # and here the answer begins
DIVERGENCE_POINTS = (len(SYSTEM), len(USER))


def harness(
    *,
    answer: str = "yes",
    rules: CheckpointRules | None = None,
    cache_ram: int = 2**20,
    **shape: int | bool,
) -> Harness:
    settings = {"n_slots": 4, "n_seqs": 12, "n_ctx": 4000, "can_cut": False, **shape}
    backend = ScriptedBackend(lambda prompt: answer, **settings)
    checkpoints = rules or CheckpointRules()
    return Harness(backend, cache_ram=cache_ram, checkpoints=checkpoints)


def prefilled(harness: Harness, task_id: int) -> int:
    return harness.finish(task_id).timings.prompt_n


SPLIT = {"n_seqs": 4, "n_ctx_seq": 1000}
KINDS = pytest.mark.parametrize(
    "shape", [{}, SPLIT, {"window": 100}], ids=["unified", "split", "window"]
)


@KINDS
@pytest.mark.parametrize(
    ("prompt", "n_new"),
    [
        (ASKED, 1),
        (ASKED + "yes" + "U2" + "A", 3),
        (SYSTEM + "U" + "v" * 60 + "A", 62),
        (ASKED + "no", 3),
        (SYSTEM + "someone else" + "A", 13),
        (USER + "another begin of the answer", 27),
    ],
    ids=["same", "next turn", "edit", "thinking cut", "same system prompt", "regenerate"],
)
def test_a_prompt_starts_where_it_diverges_from_an_earlier_one(
    prompt: str, n_new: int, shape: dict[str, int]
) -> None:
    chats = harness(answer="yes", **shape)
    chats.complete(1, ASKED, divergence_points=DIVERGENCE_POINTS)
    assert prefilled(chats, 1) == len(ASKED)
    chats.complete(2, prompt, divergence_points=(len(SYSTEM),))
    assert prefilled(chats, 2) == n_new
    assert chats.text(2) == "yes"


def test_followers_meet_their_leader_at_a_place_that_is_near() -> None:
    crowd = harness()
    for task_id in range(1, 5):
        crowd.submit(task_id, USER + f"{task_id}" * 30, divergence_points=(len(USER) - 5,))
    crowd.run()
    assert crowd.backend.n_checkpoints <= 5 + 4  # a place for all, the ends, and a copy for each
    assert [prefilled(crowd, i) for i in (2, 3, 4)] == [35, 35, 35]


def test_a_long_prompt_has_checkpoints_on_the_way() -> None:
    long = harness(rules=CheckpointRules(step=100))
    long.complete(1, "a" * 950)
    long.complete(2, "a" * 555 + "b" * 20)
    assert prefilled(long, 2) == 75


@KINDS
def test_a_state_that_cannot_be_restored_is_computed_anew(shape: dict[str, int]) -> None:
    broken = harness(**shape)
    broken.complete(1, ASKED, divergence_points=DIVERGENCE_POINTS)
    broken.backend.on_rewind = lambda: False
    broken.complete(2, SYSTEM + "hello")
    assert prefilled(broken, 2) == len(SYSTEM + "hello")
    assert broken.text(2) == "yes"
    ram = broken.engine._scheduler.cache.ram
    # It was dropped, and made again where the second prompt diverged from the first one.
    assert ram.find_checkpoint(list(SYSTEM.encode()), CacheRoot())[0] == len(SYSTEM)
    broken.backend.on_rewind = lambda: True
    broken.complete(3, SYSTEM + "and again")
    assert broken.text(3) == "yes"


@pytest.mark.parametrize(
    ("rules", "ram"),
    [(CheckpointRules(per_slot=0), 2**20), (CheckpointRules(), 0), (CheckpointRules(), 500)],
    ids=["none wanted", "no RAM", "too little RAM"],
)
def test_without_room_for_them_there_are_none(rules: CheckpointRules, ram: int) -> None:
    without = harness(rules=rules, cache_ram=ram)
    for task_id in range(1, 9):
        without.submit(task_id, ASKED + str(task_id) * 20, divergence_points=DIVERGENCE_POINTS)
    without.run()
    without.complete(9, SYSTEM + "hello")
    assert without.engine._scheduler.cache.ram.n_checkpoints == 0
    assert not without.engine.keeps_checkpoints
    assert prefilled(without, 9) == len(SYSTEM + "hello")


def test_a_slot_that_is_erased_leaves_no_checkpoint() -> None:
    one = harness()
    one.complete(1, ASKED, divergence_points=DIVERGENCE_POINTS)
    ram = one.engine._scheduler.cache.ram
    assert ram.n_checkpoints == 2
    one.engine.erase_slot(one.finish(1).slot_id, "")
    assert ram.n_checkpoints == 0
    assert ram.size == 0
    one.engine.check_integrity()


@pytest.mark.parametrize(("n_shared", "preempts"), [(200, False), (60, True)])
def test_the_windows_of_all_fit(n_shared: int, preempts: bool) -> None:
    """They are in a cache of the same size, where nothing is shared.

    Whether they will fit is known at the start, unless they grow with the outputs.
    """
    crowd = harness(n_slots=8, n_seqs=8, n_ctx=700, window=100, answer="yes" * 20)
    most = 0

    def look(backend: ScriptedBackend) -> None:
        nonlocal most
        most = max(most, backend.n_cells + len(backend.batch.rows))

    crowd.backend.on_decode = look
    for task_id in range(1, 9):
        crowd.submit(task_id, "s" * n_shared + str(task_id))
    crowd.run()
    assert 600 < most <= 700
    assert all(crowd.text(task_id) == "yes" * 20 for task_id in range(1, 9))
    events = [event for task_id in range(1, 9) for event in crowd.events[task_id]]
    assert any(isinstance(event, Preempted) for event in events) == preempts


def test_short_texts_with_a_window_need_no_checkpoints() -> None:
    backend = ScriptedBackend(n_slots=2, n_ctx=4000, can_cut=False, cuttable=200, is_elastic=True)
    harness = Harness(backend, cache_ram=2**20, checkpoints=CheckpointRules())
    harness.complete(1, "a" * 100 + "b" * 50, divergence_points=(60, 100), max_tokens=20)
    assert backend.n_checkpoints == 0
    harness.complete(2, "a" * 100 + "c" * 50, max_tokens=20)
    assert (harness.finish(2).timings.cache_n, harness.text(2)) == (100, ("A" * 100)[:20])
    harness.complete(3, "x" * 250 + "b" * 50, divergence_points=(60, 250), max_tokens=2)
    assert backend.n_checkpoints == 3, "the window is full, and forgets what is behind it"
    harness.complete(4, "x" * 250 + "c" * 50, max_tokens=2)
    assert harness.finish(4).timings.cache_n == 250


@pytest.mark.parametrize(
    ("shape", "n_shared", "n_new"),
    [
        ({"is_elastic": True}, 290, 5),
        ({"is_elastic": True}, 253, 5),
        ({"is_elastic": True}, 252, 257),
        ({"is_elastic": True}, 200, 205),
        ({}, 290, 295),  # unified: a copy would keep cells that have left the windows
    ],
)
def test_a_window_that_still_reaches_back_is_cut(
    shape: dict[str, int], n_shared: int, n_new: int
) -> None:
    window = {"sliding_window": 50, "cuttable": 49, **shape}
    chats = harness(rules=CheckpointRules(step=0), **window)
    text = "".join(chr(97 + i % 23) for i in range(300))
    chats.submit(1, text)  # with the answer 303 tokens; the window holds the last 100 of them
    chats.run()
    chats.complete(2, text[:n_shared] + "OTHER")
    assert prefilled(chats, 2) == n_new
    assert chats.text(2) == "yes"


def test_the_place_where_a_prompt_diverges_is_good_for_the_next_one() -> None:
    chats = harness(rules=CheckpointRules(step=0))
    for task_id in (1, 2, 3):
        chats.complete(task_id, SYSTEM + f"{task_id}" * 30)
    assert [prefilled(chats, task_id) for task_id in (1, 2, 3)] == [230, 230, 30]


def test_control_tokens_mark_the_turns_of_a_raw_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = harness(rules=CheckpointRules(step=0))
    pieces = [*chats.backend.vocab.pieces]
    pieces[ord("#")] = b""
    monkeypatch.setattr(type(chats.backend.vocab), "pieces", pieces)
    turns = [f"#{'abcdefgh'[i] * 40}" for i in range(8)]
    chats.complete(1, "".join(turns))
    for n_turns, n_cached in ((1, 41), (2, 82), (4, 82), (5, 205), (7, 287)):
        prompt = "".join(turns[:n_turns]) + "#OTHER"
        assert chats.engine._cache._turns(Prompt(prompt.encode()))[-1] == 41 * n_turns
        chats.complete(10 + n_turns, prompt)
        assert chats.finish(10 + n_turns).timings.cache_n == n_cached
