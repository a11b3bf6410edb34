"""Requests come back to where their beginning is cached, and no replica has too many of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from trioserve.ray.homes import ROOM, Homes

REPLICAS = [f"replica-{i}" for i in range(40)]


def blocks(*names: str, length: int = 1000) -> list[tuple[int, int]]:
    """A prompt of parts: each beginning is known by all the parts that it has."""
    return [
        (random.Random("|".join(names[: i + 1])).getrandbits(64), length * (i + 1))
        for i in range(len(names))
    ]


def router(replicas: list[str] = REPLICAS, seed: int = 1) -> Homes:
    homes = Homes(random.Random(seed))
    homes.update(replicas)
    return homes


def idle(replica: str) -> float:
    return 0.0


def test_all_routers_agree_where_a_beginning_is_at_home() -> None:
    one, other = router(seed=1), router(list(reversed(REPLICAS)), seed=2)
    firsts = [
        {each.rank(blocks(f"prompt {i}", "question"), idle)[0] for each in (one, other)}
        for i in range(50)
    ]
    assert all(len(found) == 1 for found in firsts)
    assert len(set.union(*firsts)) > 20


def test_what_begins_alike_goes_to_one_replica() -> None:
    homes = router()
    for i in range(300):  # so that none is common
        homes.rank(blocks(f"other {i}"), idle)
    found = {homes.rank(blocks("prompt", f"question {i}"), idle)[0] for i in range(3)}
    assert len(found) == 1


def test_a_beginning_that_is_common_has_homes_by_its_share_and_conversations_stay() -> None:
    homes, others = router(), router(seed=2)

    def ask(each: Homes, prompt: str, conversation: int) -> str:
        return each.rank(blocks(prompt, f"conversation {conversation}"), idle)[0]

    for i in range(2000):  # a twentieth of all: two of 40 replicas would do
        for each in (homes, others):
            ask(each, "common" if i % 20 == 0 else f"rare {i}", i)
    used = [(ask(homes, "common", i), ask(others, "common", i)) for i in range(40)]
    assert 2 < len({one for one, _ in used}) <= 3 * ROOM
    assert all(one == other for one, other in used)
    # Meanwhile it has become more common, and has more homes: most stay where they were.
    assert sum(ask(homes, "common", i) == used[i][0] for i in range(40)) >= 24


def test_what_all_requests_have_is_everywhere() -> None:
    homes = router()
    found = Counter(homes.rank(blocks("all", f"own {i}"), idle)[0] for i in range(2000))
    assert len(found) == len(REPLICAS)
    assert max(found.values()) < 4 * 2000 / len(REPLICAS)
    # The same prompt again and again has no home, since every replica has it.
    repeated = Counter(homes.rank(blocks("all", "the same"), idle)[0] for _ in range(4000))
    assert len(repeated) == len(REPLICAS)


@pytest.mark.parametrize(
    ("length", "load", "stays"),
    [
        (8000, 0.9, True),  # the slots are almost taken: better than to prefill all of it
        (8000, 1.5, False),  # half a turn of waiting: 10,000 characters
        (40_000, 1.5, True),
        (40_000, 5.0, False),
        (500, 0.9, False),  # there is not much to lose
        (500, 0.1, True),
    ],
)
def test_a_request_leaves_its_home_when_waiting_costs_more_than_the_prompt(
    length: int, load: float, stays: bool
) -> None:
    homes = router()
    prompt = blocks("prompt", length=length)
    home = homes.rank(prompt, idle)[0]
    ranks = homes.rank(prompt, lambda replica: load if replica == home else 0.0)
    assert (ranks[0] == home) is stays
    assert 2 <= len(ranks) == len(set(ranks)) <= 6


def test_without_a_beginning_the_less_full_of_two_is_chosen() -> None:
    homes = router(["a", "b"])
    assert homes.rank((), {"a": 0.5, "b": 0.25}.__getitem__) == ["b", "a"]
    assert homes.rank((), {"a": 0.5, "b": 0.75}.__getitem__) == ["a", "b"]
    used = Counter(router().rank((), idle)[0] for _ in range(3))
    assert used


def test_few_move_when_replicas_come_and_go() -> None:
    homes = router()
    prompts = [blocks(f"prompt {i}") for i in range(400)]
    before = [homes.rank(prompt, idle)[0] for prompt in prompts]
    stay = REPLICAS[4:]
    homes.update([*stay, "new 1", "new 2"])
    after = [homes.rank(prompt, idle)[0] for prompt in prompts]
    moved = sum(a != b for a, b in zip(before, after, strict=True) if a in stay)
    assert moved < 0.15 * len(prompts)
    assert set(after) <= {*stay, "new 1", "new 2"}
    assert {"new 1", "new 2"} <= set(after)


def test_a_key_has_one_replica_however_full() -> None:
    homes = router()
    assert homes.of_key("chat-7") == router(seed=3).of_key("chat-7")
    assert len({homes.of_key(f"chat-{i}") for i in range(200)}) > 30


def test_without_replicas_there_is_no_choice() -> None:
    homes = router([])
    assert homes.rank(blocks("prompt"), idle) == []
    assert homes.of_key("chat-7") is None


def test_one_replica_has_everything() -> None:
    homes = router(["only"])
    assert homes.rank(blocks("a", "b"), lambda _: 99.0) == ["only"]
    assert homes.of_key("x") == "only"


def test_what_is_rare_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.ray.homes.WINDOW", 500)
    homes = router()
    for i in range(1600):
        homes.rank(blocks(f"prompt {i}"), idle)
    assert len(homes._counts) <= 500
