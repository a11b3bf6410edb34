"""The contents of sequences, their ends, and copies of their beginnings."""

from __future__ import annotations

from array import array

import pytest

from trioserve.engine.cache.sequences import KEPT, KVSequence, Sequences
from trioserve.testing import ScriptedBackend
from trioserve.types import CacheRoot, MediaChunk

ROOT = CacheRoot()
#: Five cells at two positions.
IMAGE = list(MediaChunk(kind="image", n_cells=5, n_positions=2, id="x", content=None).keys)


@pytest.mark.parametrize(
    ("held", "last"),
    [
        ([], [-1]),
        ([0, 0, 0], [2]),
        ([0, 0, *IMAGE[:3]], [2, 3, 4]),  # within a chunk, it may be anywhere
        ([0, 0, *IMAGE], [2, 3, 4, 5, 6]),
        ([0, 0, *IMAGE, 0], [4]),
        ([*IMAGE, 0, *IMAGE, 0], [5]),
        ([*IMAGE, 0, *IMAGE], [3, 4, 5, 6, 7]),
    ],
)
def test_the_last_position_of_a_sequence(held: list[int], last: list[int]) -> None:
    seq = KVSequence(0)
    seq.fill(held)
    assert [position for position in range(-2, 12) if seq.ends_at(position)] == last


def test_cells_of_media_share_positions() -> None:
    seq, grown = KVSequence(0), KVSequence(1)
    seq.fill([0, *IMAGE, 0, *IMAGE, 0])
    assert [seq.position(cell) for cell in (0, 1, 6, 7, 12, 13)] == [0, 1, 3, 4, 6, 7]
    for part in ([0], IMAGE, [0], IMAGE, [0]):
        grown.held += part
        if part is IMAGE:
            grown.note_media()
    assert grown.folds == seq.folds == [(6, 3), (12, 6)]
    for length, folds in ((99, [(6, 3), (12, 6)]), (12, [(6, 3), (12, 6)]), (7, [(6, 3)])):
        seq.shorten(length)
        assert seq.folds == folds


def sequences_of(*lengths: int, **shape: int | bool) -> tuple[Sequences, ScriptedBackend]:
    backend = ScriptedBackend(**{"n_slots": 3, "n_ctx": 120, **shape})
    sequences = Sequences(backend)
    for seq, length in zip(sequences.all, lengths, strict=False):
        keys = [seq.id * 50 + i for i in range(length)]
        sequences.load(seq, keys, ROOT, array("i", keys).tobytes())
    return sequences, backend


@pytest.mark.parametrize(
    ("length", "can_cut", "waits"),
    [(10, True, False), (11, True, True), (10, False, False), (11, False, False)],
)
def test_a_long_copy_in_a_split_cache_waits_for_a_decode(
    length: int, can_cut: bool, waits: bool
) -> None:
    """Not where sequences cannot be cut: the copy would overwrite what is done to the target."""
    sequences, backend = sequences_of(length, n_ctx_seq=40, can_cut=can_cut)
    source, target, other = sequences.all
    sequences.copy(source, target, 5)
    assert target.held == source.held[: 5 if can_cut else length] == backend.sequences[1]
    assert sequences.can_read(target) != waits and sequences.can_read(source)
    assert sequences.loadable() == ([other] if waits else [source, target, other])
    sequences.check_integrity()
    if waits:
        backend.batch.add(1, 0, 2, logits=False)
        backend.decode()
        sequences.append_each([other], [1])
        assert sequences.can_read(target) and sequences.loadable() == sequences.all
        sequences.check_integrity()


def test_a_state_is_read_once_for_several_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, backend = sequences_of(6, n_ctx_seq=40)
    source, *targets = sequences.all
    read: list[int] = []
    save = backend.save
    monkeypatch.setattr(backend, "save", lambda seq: read.append(seq) or save(seq))
    for target in targets:
        sequences.copy(source, target, 6)
    assert read == [0]
    for target in targets:
        sequences.cut(target, 0)
    sequences.cut(source, 4)  # now it is another one
    sequences.copy(source, targets[0], 4)
    assert read == [0, 0] and backend.sequences[1] == source.held == [0, 1, 2, 3]
    backend.batch.add(9, 4, 0, logits=False)
    backend.decode()
    sequences.append(source, [9])
    sequences.copy(source, targets[1], 5)
    assert read == [0, 0, 0] and backend.sequences[2] == [0, 1, 2, 3, 9]


def test_copies_count_once_there_is_no_more_room_for_them() -> None:
    sequences, backend = sequences_of(60, n_ctx=1000, is_elastic=True, n_ctx_copies=70)
    first, second, third = sequences.all
    sequences.copy(first, second, 50)
    assert (sequences.taken, sequences.copied, backend.n_cells) == (60, 50, 110)
    assert sequences.taken_by({0, 1}) == sequences.taken_by({0}, 10, 10) == 60
    assert sequences.taken_by({1}) == 50
    assert sequences.taken_by({0, 1}, 51, 50) == 91, "there is room for 20 cells more"
    sequences.copy(first, third, 50)
    sequences.append(third, [7])
    assert (sequences.taken, sequences.copied, backend.n_cells) == (91, 70, 160)
    assert sequences.taken_by({0, 1, 2}) == 91
    sequences.cut(first, 0)
    assert (sequences.taken, sequences.copied) == (51, 50)
    sequences.cut(second, 0)
    assert (sequences.taken, sequences.copied) == (51, 0)


def test_the_memory_of_many_cells_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, backend = sequences_of(700, 200, n_ctx=1000, is_elastic=True)
    first, second, third = sequences.all
    trimmed: list[tuple[int, int]] = []
    monkeypatch.setattr(backend, "trim", lambda seq, n_cells: trimmed.append((seq, n_cells)))
    sequences.cut(first, 600)
    sequences.copy(first, third, 100)
    sequences.cut(first, 0)
    sequences.cut(second, 0)  # short texts would soon need it again
    assert trimmed == [(0, 600), (2, KEPT), (0, KEPT)]


def test_with_a_window_the_fuller_cache_counts() -> None:
    sequences, _ = sequences_of(20, 5, window=8)
    first, second, third = sequences.all
    assert (sequences.taken, sequences.taken_by({0, 1}), sequences.taken_by({1})) == (25, 25, 5)
    needed = [sequences.taken_by({0}, 20, length) - 20 for length in (0, 8, 9, 20)]
    assert needed == [20, 20, 19, 8]
    sequences.cut(second, 0)
    for target in (second, third):
        sequences.copy(first, target, 20)
    assert (sequences.taken, sequences.taken_by({0, 1}), sequences.taken_by({0})) == (24, 20, 20)
    assert sequences.own(first) == 0
    second.running = True
    assert sequences.idle() == [first, third]
