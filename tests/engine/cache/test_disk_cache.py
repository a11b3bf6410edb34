"""The prefix cache on disk: the texts that it finds and writes, by owner."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from trioserve.engine.cache import disk_cache, state_files
from trioserve.engine.cache.disk_cache import DiskCache, Index
from trioserve.engine.cache.ram_cache import CachedState
from trioserve.engine.cache.state_files import StateHead
from trioserve.types import CacheRoot
from trioserve.types.task import shared_length

ROOT = CacheRoot()
TEXT = [i % 200 for i in range(300)]
IDENTITY = ("a" * 32, ("an adapter", "another"))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "BLOCK", 4)


class Disk(DiskCache):
    """A cache, whose threads a test waits for."""

    def __init__(self, base: Path, *, cuttable: int = 10**6, limit: int = 2**24) -> None:
        super().__init__(base, limit, lambda: IDENTITY, cuttable=cuttable)
        self.start()
        self.settle()

    def settle(self) -> None:
        self._ready.wait()
        self._writer.submit(lambda: None).result()

    def keep(
        self, keys: list[int], root: CacheRoot = ROOT, *, is_checkpoint: bool = False
    ) -> CachedState:
        entry = CachedState(keys, root, bytes(key % 256 for key in keys), is_checkpoint)
        self.put(entry)
        self.settle()
        return entry

    def get(self, keys: list[int], root: CacheRoot = ROOT, *, n_held: int = 0) -> list[CachedState]:
        results: queue.Queue[list[CachedState]] = queue.Queue()
        is_read = self.fetch(
            keys, root, n_held=n_held, pays=lambda n_keys, _seconds: n_keys > 0, done=results.put
        )
        return results.get(timeout=60) if is_read else []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    cache = Disk(tmp_path)
    yield cache
    cache.close()


def lengths(states: list[CachedState]) -> list[tuple[int, bool]]:
    return [(len(one.keys), one.is_checkpoint) for one in states]


@pytest.mark.parametrize(
    ("prompt", "n_found"),
    [
        ([*TEXT, 1, 2], 300),
        (TEXT[:200], 300),
        (TEXT[:64] + [999] * 9, 300),
        (TEXT[:63], 0),
        ([999, *TEXT], 0),
    ],
    ids=["continued", "a part", "another end", "less than a block", "another begin"],
)
def test_the_beginning_of_a_prompt_is_found(
    disk: Disk, tmp_path: Path, prompt: list[int], n_found: int
) -> None:
    disk.keep(TEXT)
    again = Disk(tmp_path)  # as after a restart
    for cache in (disk, again):
        assert [len(one.keys) for one in cache.get(prompt)] == ([n_found] if n_found else [])
    again.close()


@pytest.mark.parametrize(
    "other",
    [
        CacheRoot(owner="b"),
        CacheRoot(salt="b"),
        CacheRoot(((0, 1.0),)),
    ],
)
def test_other_owners_and_roots_do_not_find_a_text(disk: Disk, other: CacheRoot) -> None:
    disk.keep(TEXT)
    assert disk.get(TEXT, other) == []
    disk.keep(TEXT, other)
    assert lengths(disk.get(TEXT, other)) == [(300, False)]


def test_an_adapter_is_known_by_its_content(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.keep(TEXT, CacheRoot(((0, 1.0),)))
    disk.close()
    moved = Disk(tmp_path)
    moved._adapters = ("another", "an adapter")
    assert moved.get(TEXT, CacheRoot(((0, 1.0),))) == []
    assert lengths(moved.get(TEXT, CacheRoot(((1, 1.0),)))) == [(300, False)]
    moved.close()


def test_another_process_finds_it_at_once(disk: Disk, tmp_path: Path) -> None:
    other = Disk(tmp_path)
    assert other.get(TEXT) == []
    disk.keep(TEXT)
    assert lengths(other.get(TEXT)) == [(300, False)]
    other.erase(TEXT, ROOT)
    assert disk.get(TEXT) == []
    other.close()


def test_a_longer_text_takes_the_place_of_its_beginning(disk: Disk, tmp_path: Path) -> None:
    disk.keep(TEXT[:100])
    disk.keep(TEXT)
    assert len(list(tmp_path.glob("*/*.kv"))) == 1
    assert lengths(disk.get(TEXT[:100])) == [(300, False)]


def test_a_checkpoint_is_read_with_its_sequence_if_that_cannot_be_cut(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path, cuttable=0)
    disk.keep(TEXT)
    assert disk.get([*TEXT[:200], 999]) == []
    disk.keep(TEXT[:100], is_checkpoint=True)
    disk.keep([*TEXT[:90], 7, *TEXT[91:]])  # the same blocks, but not all of the same keys
    prompt = [*TEXT[:200], 999]
    assert lengths(disk.get(prompt)) == [(300, False), (100, True)]
    assert lengths(disk.get(prompt, n_held=100)) == [(100, True)]
    assert lengths(disk.get([*TEXT, 1])) == [(300, False)]
    disk.close()


def test_a_damaged_file_is_removed(disk: Disk, tmp_path: Path) -> None:
    disk.keep(TEXT)
    (path,) = tmp_path.glob("*/*.kv")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert disk.get(TEXT) == []
    assert not path.exists()
    path.write_bytes(b"something else")
    again = Disk(tmp_path)
    assert again.get(TEXT) == [] and not path.exists()
    again.close()


def test_a_full_disk_ends_the_writing_for_a_while(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.keep(TEXT)
    write = state_files.os.write

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_files.os, "write", full)
    disk.keep(TEXT[::-1])
    assert disk.is_paused
    monkeypatch.setattr(state_files.os, "write", write)
    disk.keep(TEXT[::-1])
    assert lengths(disk.get(TEXT)) == [(300, False)], "it can still be read"
    assert disk.get(TEXT[::-1]) == []
    monkeypatch.setattr(disk_cache, "monotonic", lambda: disk._pause_until)
    disk.keep(TEXT[::-1])
    assert lengths(disk.get(TEXT[::-1])) == [(300, False)]


def test_a_folder_that_cannot_be_made_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = Disk(tmp_path / "file")
    disk.keep(TEXT)
    assert disk.get(TEXT) == []
    disk.close()


def test_a_state_that_is_slower_than_prefill_is_not_read(disk: Disk) -> None:
    disk.keep(TEXT)
    costs: list[float] = []

    def pays(n_keys: int, seconds: float) -> bool:
        assert n_keys == 300
        costs.append(seconds)
        return False

    for _ in range(3):
        assert not disk.fetch(TEXT, ROOT, n_held=0, pays=pays, done=lambda _: None)
    assert costs[0] > costs[1] > costs[2] > 0, "some day it is tried again"


def test_the_states_that_wait_to_be_written_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "MAX_WAITING", 700)
    go_on = threading.Event()

    def identify() -> tuple[str, tuple[str, ...]]:
        go_on.wait()
        return IDENTITY

    disk = DiskCache(tmp_path, 2**24, identify, cuttable=10**6)
    disk.start()
    for first in range(5):
        disk.put(CachedState([first, *TEXT[1:]], ROOT, bytes(300)))
    go_on.set()
    disk._ready.wait()
    disk.close()
    assert len(list(tmp_path.glob("*/*.kv"))) == 2


def test_when_the_engine_ends_writing_takes_no_longer_than_it_may(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.begin_exit()
    assert disk._deadline is not None
    disk.keep(TEXT)
    late = disk._deadline + 1
    monkeypatch.setattr(disk_cache, "monotonic", lambda: late)
    disk.keep(TEXT[::-1])
    assert disk.get(TEXT) and not disk.get(TEXT[::-1])


#: Beginnings of few texts, so that many of them are alike.
texts = st.builds(
    lambda text, length: text[:length],
    st.sampled_from([[1] * 14, [*range(14)], [*range(9), *[1] * 5]]),
    st.integers(1, 14),
)


class IndexMachine(RuleBasedStateMachine):
    """Adds, drops and looks up; the model is a set of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: dict[str, StateHead] = {}

    @rule(keys=texts, root=st.booleans(), is_checkpoint=st.booleans())
    def add(self, keys: list[int], root: bool, is_checkpoint: bool) -> None:
        head = StateHead(bytes([root] * 16), keys, is_checkpoint)
        if head.name not in self.model:
            self.index.add(head)
            self.model[head.name] = head

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.model:
            name = data.draw(st.sampled_from(sorted(self.model)))
            self.index.drop(name)
            del self.model[name]

    @rule(keys=texts, root=st.booleans())
    def look_up(self, keys: list[int], root: bool) -> None:
        digest = bytes([root] * 16)
        alike = [head for head in self.model.values() if head.root == digest]
        found = self.index.beginnings(digest, keys)
        assert {one.name for one in found} == {
            head.name for head in alike if keys[: len(head.keys)] == head.keys
        }
        assert [one.n_keys for one in found] == sorted(one.n_keys for one in found)
        shared = {
            head.name: shared_length(list(head.keys), keys) // 4 * 4
            for head in alike
            if not head.is_checkpoint
        }
        n_most = max(shared.values(), default=0)
        length, carriers = self.index.carriers(digest, keys)
        assert length == n_most
        expected = {name for name, n in shared.items() if n == n_most and n}
        assert {one.name for one in carriers} == expected

    def teardown(self) -> None:
        for name in [*self.model]:
            self.index.drop(name)
        assert not self.index._through and not self.index._ending and not self.index.entries


@pytest.mark.usefixtures("small_blocks")
def test_the_index_agrees_with_a_list() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=50))
