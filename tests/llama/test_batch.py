from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from trioserve.errors import EngineError
from trioserve.llama.batch import LlamaBatch


def make(capacity: int = 8) -> LlamaBatch:
    return LlamaBatch(capacity, n_vocab=100, n_seqs=4)


def contents(batch: LlamaBatch) -> list[tuple[int, int, int, int]]:
    """Read what C reads: token, position, sequence and logits of each row."""
    struct, _ = batch.seal()
    rows = range(struct.n_tokens)
    assert all(struct.n_seq_id[i] == 1 for i in rows)
    return [(struct.token[i], struct.pos[i], struct.seq_id[i][0], struct.logits[i]) for i in rows]


def test_c_reads_what_was_added() -> None:
    batch = make()
    assert batch.add(7, 40, 0, logits=False) == 0
    assert batch.add(9, 41, 0, logits=True) == 1
    assert batch.extend((1, 2, 3), 5, 3) == 4
    batch.want_logits(4)
    assert batch.add_each([4, 5], [60, 0], [1, 2]) == range(5, 7)
    assert contents(batch) == [
        (7, 40, 0, 0),
        (9, 41, 0, 1),
        (1, 5, 3, 0),
        (2, 6, 3, 0),
        (3, 7, 3, 1),
        (4, 60, 1, 1),
        (5, 0, 2, 1),
    ]
    assert batch.add_each([], [], []) == range(7, 7)
    assert batch.seal()[1] == b"\0\1\0\0\1\1\1"
    assert len(batch) == 7


@pytest.mark.parametrize("count", [1, 2, 20])
def test_rows_advance(count: int) -> None:
    batch = LlamaBatch(32, n_vocab=100, n_seqs=32)
    seqs = list(range(count))
    batch.add_each(seqs, [10 * seq for seq in seqs], seqs)
    for step in (1, 2):
        batch.advance([50 + step] * count)
        assert contents(batch) == [(50 + step, 10 * seq + step, seq, 1) for seq in seqs]
    for wrong in ([100] * count, [-1] * count, [2**40] * count, [1] * (count + 1)):
        with pytest.raises(EngineError):
            batch.advance(wrong)
        batch.clear()
        batch.add_each(seqs, [10 * seq for seq in seqs], seqs)
    batch.clear()
    batch.add_each(seqs, [2**31 - 1] * count, seqs)
    with pytest.raises(EngineError):
        batch.advance([1] * count)


def test_nothing_is_left_after_clear() -> None:
    batch = make()
    batch.add(1, 0, 0, logits=True)
    batch.clear()
    assert len(batch) == 0
    assert contents(batch) == []
    batch.extend([5, 6], 0, 1)
    assert contents(batch) == [(5, 0, 1, 0), (6, 1, 1, 0)]


@pytest.mark.parametrize(
    "add",
    [
        lambda batch: batch.extend(range(8), 0, 0),
        lambda batch: batch.extend([100], 0, 0),
        lambda batch: batch.extend([-1], 0, 0),
        lambda batch: batch.extend([2**40], 0, 0),
        lambda batch: batch.extend([1], 0, 4),
        lambda batch: batch.extend([1], 0, -1),
        lambda batch: batch.extend([1], -1, 0),
        lambda batch: batch.extend([1, 2], 2**31 - 2, 0),
        lambda batch: batch.add(100, 0, 0, logits=False),
        lambda batch: batch.add(-1, 0, 0, logits=False),
        lambda batch: batch.add(1, -1, 0, logits=False),
        lambda batch: batch.add(1, 2**31, 0, logits=False),
        lambda batch: batch.add(1, 0, 4, logits=False),
        lambda batch: batch.add_each(range(8), range(8), [0] * 8),
        lambda batch: batch.add_each([1, 100], [0, 0], [0, 1]),
        lambda batch: batch.add_each([1, -1], [0, 0], [0, 1]),
        lambda batch: batch.add_each([1, 2**40], [0, 0], [0, 1]),
        lambda batch: batch.add_each([1, 2], [0, -1], [0, 1]),
        lambda batch: batch.add_each([1, 2], [0, 2**31], [0, 1]),
        lambda batch: batch.add_each([1, 2], [0, 0], [0, 4]),
        lambda batch: batch.add_each([1, 2], [0, 0], [0, -1]),
        lambda batch: batch.want_logits(1),
        lambda batch: batch.want_logits(-1),
    ],
)
def test_bad_values_are_refused_before_c(add: Callable[[LlamaBatch], object]) -> None:
    batch = make()
    batch.add(1, 0, 0, logits=False)
    with pytest.raises(EngineError):
        add(batch)
    assert contents(batch) == [(1, 0, 0, 0)]


def test_a_full_batch_takes_no_more() -> None:
    batch = make(2)
    batch.extend((1, 2), 0, 0)
    with pytest.raises(EngineError, match="holds 2 of 2 tokens, and 1 more do not fit"):
        batch.add(3, 2, 0, logits=False)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(-2, 101), max_size=5)), max_size=6))
def test_a_batch_is_what_was_accepted(steps: list[tuple[bool, list[int]]]) -> None:
    batch, expected = make(), []
    for at_once, tokens in steps:
        chunks = [tokens] if at_once else [[token] for token in tokens]
        for chunk in chunks:
            fits = len(expected) + len(chunk) <= 8 and all(0 <= t < 100 for t in chunk)
            try:
                if at_once:
                    batch.extend(chunk, 0, 2)
                else:
                    batch.add(chunk[0], 0, 2, logits=False)
            except EngineError:
                assert not fits
            else:
                assert fits
                expected += [(token, i, 2, 0) for i, token in enumerate(chunk)]
    assert contents(batch) == expected
