"""The start of a prompt: from a sequence, from RAM, or at its beginning; and evictions."""

from __future__ import annotations

from array import array

import pytest

from trioserve.engine.cache.prefix_cache import PrefixCache
from trioserve.engine.cache.sequences import KVSequence
from trioserve.testing import ScriptedBackend
from trioserve.types import CacheRoot, SlotState

ROOT = CacheRoot()
END = [200, 201]  # of a prompt; no sequence has any of it


def keys_of(length: int) -> list[int]:
    return [i % 150 for i in range(length)]


class Cache(PrefixCache):
    """A cache over a scripted backend, with sequences that are kept."""

    def __init__(self, *lengths: int, ram: int = 2**20, max_idle: int | None = None) -> None:
        self.backend = ScriptedBackend(n_slots=3)
        super().__init__(self.backend, ram, max_idle=max_idle)
        for length in lengths:
            self.keep(keys_of(length))

    def keep(self, keys: list[int]) -> None:
        self.restore(SlotState(keys=tuple(keys), root=ROOT, state=array("i", keys).tobytes()))

    def begin(self, keys: list[int]) -> KVSequence:
        seq = self.start(keys, ROOT, reuse=True)
        self.check_integrity()
        return seq

    def go_on(self, seq: KVSequence, keys: list[int]) -> None:
        self.backend.batch.clear()
        self.backend.batch.extend(keys, len(seq.held), seq.id)
        self.backend.decode()
        self.held.append(seq, keys)

    @property
    def lengths(self) -> list[int]:
        return [len(seq.held) for seq in self.held.all]


@pytest.mark.parametrize(
    ("n_kept", "n_shared", "n_prompt", "lengths", "n_in_ram"),
    [
        (40, 32, 34, [40, 32, 0], 0),  # a copy
        (32, 32, 34, [32, 0, 0], 0),  # it continues from there
        (32, 32, 32, [31, 0, 0], 0),  # but for the last cell
        (40, 31, 33, [31, 0, 0], 0),  # too short for a copy
        (62, 31, 33, [31, 0, 0], 0),
        (63, 31, 33, [31, 0, 0], 1),  # what is lost of it goes to RAM
        (40, 31, 311, [31, 0, 0], 0),
        (40, 31, 312, [40, 0, 0], 0),  # too little to be worth it
    ],
)
def test_where_a_prompt_starts(
    n_kept: int, n_shared: int, n_prompt: int, lengths: list[int], n_in_ram: int
) -> None:
    cache = Cache(n_kept)
    seq = cache.begin(keys_of(n_shared) + [200] * (n_prompt - n_shared))
    assert (cache.lengths, len(cache.ram)) == (lengths, n_in_ram)
    assert seq.running and seq.root == ROOT


@pytest.mark.parametrize(
    ("n_shared", "n_prompt", "n_held"),
    [(31, 63, 0), (32, 64, 32), (63, 65, 63), (7, 9, 0), (8, 16, 8), (8, 17, 0)],
)
def test_an_evicted_sequence_comes_back_from_ram(n_shared: int, n_prompt: int, n_held: int) -> None:
    cache = Cache(64)
    assert cache.evict_one() and not cache.evict_one()
    assert (cache.lengths, len(cache.ram), cache.held.taken) == ([0, 0, 0], 1, 0)
    assert len(cache.begin(keys_of(n_shared) + [200] * (n_prompt - n_shared)).held) == n_held
    assert not cache.evict_one(), "it runs"


@pytest.mark.parametrize(("length", "n_in_ram"), [(7, 0), (8, 1)])
def test_a_short_sequence_is_not_copied_to_ram(length: int, n_in_ram: int) -> None:
    cache = Cache(length)
    cache.evict_one()
    assert len(cache.ram) == n_in_ram


@pytest.mark.parametrize(("length", "n_in_ram"), [(161, 0), (160, 1)])
def test_a_sequence_that_others_hold_nearly_whole_is_not_copied_to_ram(
    length: int, n_in_ram: int
) -> None:
    cache = Cache(length)
    seq = cache.begin(keys_of(length - 10) + END)
    cache.go_on(seq, [200] * 10)
    cache.release(seq)
    cache.release(cache.begin([*keys_of(length), 1]))  # the other one was used later
    assert cache.evict_one()
    assert (cache.lengths, len(cache.ram)) == ([length, 0, 0], n_in_ram)


@pytest.mark.parametrize(("n_shared", "n_held"), [(31, 0), (32, 32)])
def test_the_only_idle_sequence_is_cut(n_shared: int, n_held: int) -> None:
    cache = Cache(40)
    for _ in range(2):
        cache.begin(END)
    seq = cache.begin(keys_of(n_shared) + END * 200)
    assert (seq.id, len(seq.held)) == (0, n_held)


def test_a_copy_of_a_little_of_a_long_text_takes_longer_than_to_prefill_it() -> None:
    for n_more, n_held in ((600, 40), (601, 0)):
        backend = ScriptedBackend(n_slots=2, n_batch=1000, n_ctx=1000, is_elastic=True)
        cache = PrefixCache(backend)
        source = cache.start(keys_of(40) + END, ROOT, reuse=True)
        backend.batch.extend(keys_of(40) + [203] * n_more, 0, source.id)
        backend.decode()
        cache.held.append(source, keys_of(40) + [203] * n_more)
        assert len(cache.start(keys_of(40) + END, ROOT, reuse=True).held) == n_held
        cache.check_integrity()


def test_the_next_sequence_to_evict_is_copied_to_ram_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    for first in (0, 1, 2):
        cache.keep([first] * 40)
    cache.held.all[0].running = True
    assert cache.swap_out_ahead() and len(cache.ram) == 1
    assert cache.ram.holds([1] * 40, ROOT)
    assert cache.swap_out_ahead() and not cache.swap_out_ahead()
    assert len(cache.ram) == 2 and cache.lengths == [40, 40, 40]
    monkeypatch.setattr(cache.backend, "save", None)  # it is there already
    assert cache.begin(END).id == 1
    cache.check_integrity()


@pytest.mark.parametrize(("n_idle", "kept"), [(50, 50), (51, 0)])
@pytest.mark.parametrize("ram", [0, 2**20])
def test_idle_cells_beyond_a_limit_go_to_ram(n_idle: int, kept: int, ram: int) -> None:
    cache = Cache(n_idle, max_idle=50, ram=ram)
    cache.go_on(cache.begin(END), END * 30)  # what runs does not count
    cache.begin(END)
    assert cache.lengths[0] == (kept if ram else n_idle)
    assert len(cache.ram) == bool(ram and not kept)


@pytest.mark.parametrize(
    ("running", "ram", "chosen"),
    [
        ((), 2**20, 3),  # the free one
        ((2,), 2**20, 3),
        ((1,), 2**20, 0),
        ((0, 2), 2**20, 1),  # the gap before the free one at the end
        ((0, 1), 2**20, 2),
        ((0, 2), 0, 3),  # what is held would be lost
        ((3, 2, 1), 2**20, 0),
    ],
)
def test_in_a_split_cache_running_sequences_stay_together(
    running: tuple[int, ...], ram: int, chosen: int
) -> None:
    backend = ScriptedBackend(n_slots=4, is_elastic=True)
    cache = PrefixCache(backend, ram)
    for i in range(3):
        keys = [i * 40 + 1 + key for key in range(40)]
        cache.restore(SlotState(keys=tuple(keys), root=ROOT, state=array("i", keys).tobytes()))
    for i in running:
        cache.held.all[i].running = True
    assert cache.start(END, ROOT, reuse=True).id == chosen
