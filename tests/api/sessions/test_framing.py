"""Events out of parts, and their ids."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, strategies as st

from trioserve.api.sessions import Framing

BODIES = st.lists(
    st.sampled_from(
        [b"data: x\n\n", b": ping\n\n", b"event: e\ndata: " + b"y" * 90 + b"\n\n", b":\n\n"]
    ),
    max_size=12,
).map(b"".join)


def framed(framing: Framing, parts: list[bytes], offset: int = 0) -> bytes:
    written = bytearray()
    for part in parts:
        written += framing.feed(part, offset + len(written))
    return bytes(written)


def cut(body: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[a:b] for a, b in pairwise(at)]


@given(BODIES, st.lists(st.integers(0, 10**4), max_size=6), st.integers(0, 10**7))
def test_events_are_the_same_for_all_splits_of_a_body(
    body: bytes, places: list[int], offset: int
) -> None:
    parts = cut(body, places)
    whole = framed(Framing(), [body], offset)
    assert framed(Framing(), parts, offset) == whole
    assert re.sub(rb"id: \d+\n", b"", whole) == body
    ends = []
    for event in whole.split(b"\n\n")[:-1]:
        offset += len(event) + 2
        assert (b"data:" in event) == event.startswith(b"id: ")
        if event.startswith(b"id: "):
            ends.append(offset)
    assert ends == [int(each) for each in re.findall(rb"id: (\d+)\n", whole)]


def test_an_id_counts_its_own_digits() -> None:
    for offset in range(1200):
        event = Framing().feed(b"data: x\n\n", offset)
        assert event == b"id: %d\ndata: x\n\n" % (offset + len(event))


def test_lines_have_no_ids() -> None:
    framing = Framing("application/x-ndjson")
    assert framed(framing, [b'{"a":', b"1}\n{}\n", b"{"]) == b'{"a":1}\n{}\n'
    assert framing.n_events == 2
