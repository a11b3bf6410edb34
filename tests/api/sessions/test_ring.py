"""The ring of a stream's bytes: a reader gets a contiguous part of the stream, or an error."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trioserve.api.sessions import OffsetError, Ring

MARK = b"\n\n"

#: Events without their mark, which must not begin or end with a part of it.
EVENTS = st.binary(min_size=1, max_size=24).map(lambda data: data.replace(b"\n", b"-")) | st.just(
    b"a\nb"
)


class Readers(RuleBasedStateMachine):
    """Appends, drops, reads from any offset and a close, in any order."""

    @initialize(max_bytes=st.integers(1, 80))
    def begin(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.ring = Ring(max_bytes, MARK)
        self.whole = b""
        self.ends = {0}
        self.start = 0
        self.readers: list[tuple[int, bytearray]] = []  # where each began, and what it has got

    @precondition(lambda self: not self.ring.closed)
    @rule(events=st.lists(EVENTS, min_size=1, max_size=3))
    def append(self, events: list[bytes]) -> None:
        for event in events:
            self.whole += event + MARK
            self.ends.add(len(self.whole))
        self.ring.append(b"".join(event + MARK for event in events))
        self.starts_after(len(self.whole) - self.max_bytes)

    def starts_after(self, offset: int) -> None:
        """Check that what was before an offset is gone, and no event that came after it."""
        if offset > self.start:
            self.start = min((end for end in self.ends if end >= offset), default=len(self.whole))
        assert self.ring.start == self.start

    @rule(n_bytes=st.integers(0, 100))
    def drop(self, n_bytes: int) -> None:
        self.ring.drop(n_bytes)
        self.starts_after(self.start + n_bytes)

    @rule()
    def close(self) -> None:
        self.ring.closed = True

    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        near = st.integers(max(self.ring.start - 5, 0), self.ring.end + 5)
        offset = data.draw(near)
        there = self.ring.start <= offset <= self.ring.end
        if there:
            self.ring.check(offset)
            assert self.ring.is_boundary(offset) == (offset in self.ends)
            self.readers.append((offset, bytearray()))
        else:
            with pytest.raises(OffsetError):
                self.ring.check(offset)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), about=st.integers(1, 40))
    def read(self, data: st.DataObject, about: int) -> None:
        began, got = data.draw(st.sampled_from(self.readers))
        offset = began + len(got)
        if offset < self.ring.start:
            with pytest.raises(OffsetError, match="no longer kept"):
                self.ring.read(offset, about)
            return
        new = self.ring.read(offset, about)
        got += new
        assert bool(new) == (offset < len(self.whole))
        assert not new or began + len(got) in self.ends
        in_one_event = not any(offset < end < offset + len(new) for end in self.ends)
        assert len(new) <= about or in_one_event

    @invariant()
    def each_reader_has_a_contiguous_part(self) -> None:
        if hasattr(self, "ring"):
            for began, got in self.readers:
                assert self.whole[began : began + len(got)] == got

    @invariant()
    def what_is_kept_are_the_newest_whole_events(self) -> None:
        if hasattr(self, "ring"):
            assert len(self.ring) <= self.max_bytes
            assert self.ring.start in self.ends
            assert self.ring.end == len(self.whole)


Readers.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestReaders = Readers.TestCase


def test_memory_does_not_grow_with_the_length_of_the_stream() -> None:
    ring = Ring(10_000, MARK)
    for _ in range(10_000):
        ring.append(b"x" * 98 + MARK)
        assert ring._bytes.__sizeof__() < 25_000
    assert ring.end == 1_000_000


def test_a_read_ends_with_an_event() -> None:
    ring = Ring(100, MARK)
    ring.append(b"one\n\ntwo\n\n")
    assert ring.read(0, 1) == b"one\n\n"
    assert ring.read(4, 1) == b"\n"  # from within a mark
    assert ring.read(4, 100) == b"\ntwo\n\n"


def test_an_event_is_found_by_its_number() -> None:
    ring, ends = Ring(2**16, MARK), list[int]()
    for i in range(9000):
        ring.append(b"event %d" % i + MARK)
        ends.append(ring.end)
        if i % 3 == 0:
            ring.append(b": a comment" + MARK)
    first = ring.n_dropped
    assert 0 < first < 8000
    for number in (first, first + 1, first + 999, 8500, 8998, 8999):
        assert ring.after(number, "n") == ends[number]
    for number in (0, first - 1):
        with pytest.raises(OffsetError, match="not kept"):
            ring.after(number, "n")
    with pytest.raises(OffsetError, match="above 8999"):
        ring.after(9000, "n")
