"""N-grams: what is found, what is forgotten, and whose texts are looked at."""

from __future__ import annotations

from hypothesis import given, strategies as st

from trioserve.engine import DraftRequest
from trioserve.engine.drafts.ngrams import NgramDrafter, NgramIndex, NgramRules
from trioserve.types import CacheRoot


def ask(
    drafter: NgramDrafter, text: str, slot_id: int = 0, root: CacheRoot | None = None, n: int = 8
) -> str:
    request = DraftRequest(slot_id, list(text.encode()), root or CacheRoot(), n)
    return bytes(drafter.propose([request])[0]).decode()


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12),
    st.integers(1, 3),
    st.integers(2, 12),
)
def test_a_guess_is_what_came_after_the_last_place_of_the_same_tokens(
    parts: list[list[int]], n: int, half: int
) -> None:
    index = NgramIndex(n, 2 * (half + n))
    text: list[int] = []
    for part in parts:
        index.add(part)
        text += part
        assert len(index) <= 2 * (half + n)
        assert list(index.text) == text[len(text) - len(index) :]
        if len(text) < n:
            continue
        guess = list(index.guess(text[-n:], 5))
        places = [
            i for i in range(len(text) - len(index) + n, len(text)) if text[i - n : i] == text[-n:]
        ]
        assert bool(guess) == bool(places)
        if guess:
            assert guess == text[places[-1] :][: len(guess)]


def test_a_text_that_repeats_itself() -> None:
    drafter = NgramDrafter(NgramRules(name="ngram-simple", n=3, n_max=4))
    assert ask(drafter, "abcdefgh") == ""
    assert ask(drafter, "abcdefgh.abc") == "defg"
    assert ask(drafter, "abcdefgh.abcd", n=2) == "ef"
    assert ask(drafter, "abcdefgh.abcd?") == ""
    assert ask(drafter, "ab", slot_id=1) == ""


def test_a_text_in_a_loop_goes_round_as_often_as_there_is_room() -> None:
    drafter = NgramDrafter(NgramRules(name="ngram-simple", n=3, n_max=8))
    assert ask(drafter, "xaaaa") == "aaaaaaaa"
    assert ask(drafter, "xyabcdabc", slot_id=1) == "dabcdabc"


def test_a_guess_that_is_too_short_is_none() -> None:
    drafter = NgramDrafter(NgramRules(name="ngram-mod", n=2, n_min=3, n_max=8))
    assert ask(drafter, "abcdab") == "cdabcdab"
    assert ask(drafter, "abcdab", n=2) == ""


def test_texts_of_earlier_requests_of_the_same_root() -> None:
    drafter = NgramDrafter(NgramRules(name="ngram-mod", n=3, n_max=4, shared=True))
    mine, yours = CacheRoot(owner="me"), CacheRoot(owner="you")
    assert ask(drafter, "abcdefgh", root=mine) == ""
    drafter.forget(0)
    assert ask(drafter, "abc", root=yours) == ""
    assert ask(drafter, "abc", slot_id=1, root=mine) == "defg"
    assert ask(drafter, "abc", slot_id=2, root=CacheRoot(owner="me", salt="x")) == ""


def test_the_roots_that_were_not_used_for_longest_are_forgotten() -> None:
    drafter = NgramDrafter(NgramRules(name="ngram-mod", n=3, n_max=4, shared=True))
    for owner in "abcdefghijkl":
        ask(drafter, owner * 3 + "." * 40_000, root=CacheRoot(owner=owner))
        drafter.forget(0)
        assert 0 < drafter.n_shared <= 2**18
    roots = [root.owner for root in drafter._shared]
    assert roots == list("abcdefghijkl")[-len(roots) :] and 3 < len(roots) < 12
