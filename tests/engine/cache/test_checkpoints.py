"""Places of checkpoints, and the order in which RAM drops its entries."""

from __future__ import annotations

import pytest

from trioserve.engine.cache.prefix_cache import (
    CheckpointRules,
    checkpoint_positions,
    divergence_point,
    next_checkpoint,
)
from trioserve.engine.cache.ram_cache import CachedState, RamCache
from trioserve.types import CacheRoot

RULES = CheckpointRules(step=1000)
ROOT = CacheRoot()


@pytest.mark.parametrize(
    ("n_prompt", "divergence_points", "places"),
    [
        (500, (), [496]),
        (500, (100, 400, 490), [100, 400, 490]),
        (500, (100, 400, 470), [100, 400, 470, 496]),
        (500, (100, 110, 488), [100, 488]),
        (500, (0, 5, 16, 500, 900), [496]),
        (20, (), []),
        (2500, (40,), [40, 1000, 2000, 2496]),
    ],
    ids=[
        "no divergence_points",
        "a chat",
        "a long header",
        "close together",
        "useless",
        "short",
        "long",
    ],
)
def test_the_positions_of_checkpoints(
    n_prompt: int, divergence_points: tuple[int, ...], places: list[int]
) -> None:
    assert checkpoint_positions(n_prompt, divergence_points, RULES) == places


def test_followers_meet_where_a_place_is_near() -> None:
    places = [100, 500]
    assert divergence_point(places, 110, RULES) == 100
    assert places == [100, 500]
    assert divergence_point(places, 130, RULES) == 130
    assert divergence_point(places, 40, RULES) == 40
    assert divergence_point(places, 490, RULES) == 490
    assert divergence_point(places, 500, RULES) == 490
    assert places == [40, 100, 130, 490]


def test_the_next_place_lies_ahead() -> None:
    assert next_checkpoint([10, 20], 5) == 10
    assert next_checkpoint([10, 20], 10) == 20
    assert next_checkpoint([10, 20], 20) is None


def cache(limit: int = 100, max_checkpoints: int = 9, useless: set[int] | None = None) -> RamCache:
    def is_useful(entry: CachedState) -> bool:
        return entry.keys[0] not in (useless or set())

    return RamCache(limit, cuttable=0, max_checkpoints=max_checkpoints, is_useful=is_useful)


def state(keys: list[int], size: int, *, is_checkpoint: bool = False) -> CachedState:
    return CachedState(keys, ROOT, bytes(size), is_checkpoint)


def held(ram: RamCache) -> list[int]:
    ram.check_integrity()
    return sorted(entry.keys[0] for entry in ram._entries.values())


def test_the_one_unused_for_longest_goes_first() -> None:
    ram = cache()
    for key in (1, 2, 3):
        ram.put(state([key], 30, is_checkpoint=True))
    ram.get(ram.find_checkpoint([1], ROOT)[1])
    ram.put(state([4, 4], 30))
    assert held(ram) == [1, 3, 4]


def test_useless_checkpoints_are_evicted_first() -> None:
    useless: set[int] = set()
    ram = cache(useless=useless)
    for key in (1, 2, 3):
        ram.put(state([key], 30, is_checkpoint=True))
    useless.add(2)
    ram.put(state([4, 4], 30))
    assert held(ram) == [1, 3, 4]
    useless.add(3)
    ram.drop_useless()
    assert held(ram) == [1, 4]


def test_there_are_so_many_checkpoints_and_no_more() -> None:
    ram = cache(max_checkpoints=2)
    ram.put(state([9, 9], 10))
    for key in (1, 2, 3):
        ram.put(state([key], 1, is_checkpoint=True))
    assert held(ram) == [2, 3, 9]


def test_the_limit_may_be_reached() -> None:
    ram = cache()
    for key, size in ((1, 60), (2, 40)):
        ram.put(state([key, key], size))
    assert held(ram) == [1, 2]
    assert not ram.make_room(101) and held(ram) == [1, 2]
    assert ram.make_room(1) and held(ram) == [2]
    assert ram.make_room(100) and held(ram) == []


def test_a_text_is_found_whole_or_else_its_beginning() -> None:
    ram = cache()
    for keys in ([1, 2, 3, 4], [1, 2], [1, 2, 3, 5]):
        ram._add(CachedState(keys, ROOT, b"x"))
    assert [ram.find_whole(keys, ROOT) for keys in ([1, 2, 3], [1, 2, 9], [1, 2, 3, 5])] == [
        (3, 0),
        (2, 1),
        (4, 2),
    ]
    assert ram.find_whole([9], ROOT) == ram.find([9], ROOT) == (0, -1)
    assert ram.find_checkpoint([1], ROOT) == (0, -1)


def test_a_longer_state_is_of_use_at_a_checkpoint() -> None:
    ram = cache()
    ram.put(state([1, 2, 3, 4], 10))
    assert ram.find([1, 2, 7], ROOT)[0] == 0
    ram.put(state([1, 2], 1, is_checkpoint=True))
    length, entry_id = ram.find([1, 2, 7], ROOT)
    assert (length, ram.get(entry_id).keys) == (2, [1, 2, 3, 4])
    assert ram.find([1, 2, 3, 4, 5], ROOT)[0] == 4
    assert ram.find([1, 2, 7], CacheRoot(owner="b"))[0] == 0
