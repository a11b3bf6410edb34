"""Texts in bytes that come in pieces: however they are split, the outcome is the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given, strategies as st

from trioserve.engine.reasoning import ReasoningScanner, StringScanner, TriggerScanner
from trioserve.types import Thinking

THINK = Thinking(start="<t>", end="</t>")
BEGUN = Thinking(start="<t>", end="</t>", begun=True)

texts = st.text(alphabet="<>/t ab\né", max_size=40)
stages = st.lists(
    st.lists(st.text(alphabet="<>/tab", min_size=1, max_size=4), min_size=1, max_size=3),
    max_size=3,
)


def pieces_of(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, stop in pairwise(places):
        yield data[start:stop]


def feed(
    scanner: StringScanner | ReasoningScanner | TriggerScanner, data: bytes, cuts: list[int]
) -> bytes | None:
    """Feed it piece by piece; what follows the end of the piece that was enough counts, too."""
    rest: bytes | None = None
    for piece in pieces_of(data, cuts):
        if rest is None:
            scanner = scanner.fork()
            rest = scanner.feed(piece)
        else:
            rest += piece
    return rest


@given(texts, st.lists(st.text(alphabet="<>/tab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_scanner_finds_the_text_that_is_complete_first(text: str, wanted: list[str]) -> None:
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(one) for one in wanted)]
    expected = text[min(ends) :].encode() if ends else None
    assert StringScanner(wanted).feed(text.encode()) == expected


@given(texts, st.lists(st.integers(0, 100)), stages, st.sampled_from([None, THINK, BEGUN]))
def test_the_split_makes_no_difference(
    text: str, cuts: list[int], wanted: list[list[str]], thinking: Thinking | None
) -> None:
    data = text.encode()
    assert feed(TriggerScanner(thinking, wanted), data, cuts) == TriggerScanner(
        thinking, wanted
    ).feed(data)


def test_reasoning_is_passed() -> None:
    assert ReasoningScanner(THINK).feed(b" \n<t>a</t>b") == b"b"
    assert ReasoningScanner(BEGUN).feed(b"a</t>b") == b"b"
    assert ReasoningScanner(THINK).feed(b"a<t>b</t>c") == b"a<t>b</t>c"


def test_a_scanner_knows_its_place() -> None:
    scanner = ReasoningScanner(THINK)
    assert scanner.missing == b"<t>"
    assert scanner.feed(b"\n<") is None
    assert (scanner.missing, scanner.inside) == (b"t>", False)
    assert scanner.feed(b"t>") is None
    assert (scanner.missing, scanner.inside) == (b"", True)
    assert scanner.feed(b"a</t>") == b""
    assert not scanner.inside


def test_only_reasoning_that_may_come_is_missing() -> None:
    gate = TriggerScanner(THINK, [["a"]])
    assert (gate.missing, gate.fork().missing) == (b"<t>", b"<t>")
    assert gate.feed(b"b") is None and gate.missing == b""
    assert TriggerScanner(None, [["a"]]).missing == TriggerScanner(None, []).missing == b""


def test_stages_follow_one_another() -> None:
    gate = TriggerScanner(None, [["a"], ["b", "cc"]])
    assert gate.feed(b"b cc") is None
    assert gate.feed(b"a c") is None
    assert gate.feed(b"c!") == b"!"


def test_without_stages_the_grammar_gets_the_whole_output() -> None:
    assert TriggerScanner(None, []).feed(b"x") == b"x"
