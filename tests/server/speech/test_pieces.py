"""Tests of the cutter of texts."""

# ruff: noqa: RUF001 - the texts are in several scripts

from time import process_time

import pytest
from hypothesis import given, strategies as st

from trioserve.server.speech.pieces import Cutter, Sentences, sentences_of, without_marks

TEXTS = st.text(max_size=300) | st.text("ab .,!?\n\"'。，،😀\ud800", max_size=300)


def n_words(text: str) -> int:
    return len(text.split())


def n_odd(text: str) -> int:
    """A count that texts have more of together than alone, as of a vocabulary with odd merges."""
    return len(text) + (len(text) > 5)


@given(TEXTS, st.integers(1, 40))
def test_pieces_joined_are_the_text(text: str, most: int) -> None:
    assert "".join(Cutter(len, most).cut(text)) == text
    assert "".join(sentences_of(text)) == text


@given(TEXTS, st.integers(7, 40))
def test_no_piece_is_too_long(text: str, most: int) -> None:
    assert all(n_odd(piece) <= most for piece in Cutter(n_odd, most).cut(text))


def test_sentences_are_joined_as_long_as_they_fit() -> None:
    text = "One two. Three four five. Six. Seven eight nine ten."
    cutter = Cutter(n_words, 5)
    assert cutter.cut(text) == ["One two. Three four five. ", "Six. Seven eight nine ten."]
    assert Cutter(n_words, 100).cut(text) == [text]


def test_abbreviations_and_numbers_end_no_sentence() -> None:
    text = "Dr. Smith paid 3.50 dollars. It was e.g. a gift."
    assert sentences_of(text) == ["Dr. Smith paid 3.50 dollars. ", "It was e.g. a gift."]
    german = "Am 3. Oktober kam z. B. Dr. Meier. Ja!"
    assert sentences_of(german, "de") == ["Am 3. Oktober kam z. B. Dr. Meier. ", "Ja!"]


def test_scripts_without_spaces_have_sentences_too() -> None:
    assert sentences_of("你好。今天天气很好！是吗？", "zh") == [
        "你好。",
        "今天天气很好！",
        "是吗？",
    ]
    assert sentences_of("नमस्ते। आप कैसे हैं?", "hi") == ["नमस्ते। ", "आप कैसे हैं?"]


def test_a_long_sentence_is_cut_at_clauses_and_then_at_words() -> None:
    text = "a b c, d e f g h i j, k"
    assert Cutter(n_words, 4).cut(text) == ["a b c, ", "d e f g ", "h i j, k"]


def test_a_text_without_any_end_is_cut_anywhere() -> None:
    pieces = Cutter(len, 50).cut("x" * 100_000)
    assert "".join(pieces) == "x" * 100_000
    assert max(map(len, pieces)) <= 50


def test_a_long_text_is_counted_a_few_times_only() -> None:
    n_counted = 0

    def count(text: str) -> int:
        nonlocal n_counted
        n_counted += len(text)
        return len(text)

    for text in ("x" * 10_000, "x " * 5_000, "Yes. " * 2_000, ", " * 5_000):
        n_counted = 0
        Cutter(count, 50).cut(text)
        assert n_counted < 20 * len(text)


def test_an_unknown_language_is_cut_as_english() -> None:
    assert sentences_of("Ja. Nein.", "tlh") == ["Ja. ", "Nein."]


@given(st.lists(st.text("ab. !?\n,", max_size=9), max_size=60))
def test_sentences_that_come_in_parts_are_the_text(parts: list[str]) -> None:
    sentences = Sentences()
    found = [*map(sentences.feed, parts), sentences.rest()]
    assert "".join(found) == "".join(parts)


def test_a_sentence_is_whole_when_the_next_one_begins() -> None:
    sentences = Sentences()
    parts = ["Dr.", " Smith is", " here. ", "He ", "waits. And"]
    assert [sentences.feed(part) for part in parts] == [
        "",
        "",
        "",
        "Dr. Smith is here. ",
        "He waits. ",
    ]
    assert sentences.rest() == "And"


def test_a_text_without_an_end_does_not_gather() -> None:
    sentences = Sentences()
    found = [sentences.feed("word ") for _ in range(1000)]
    assert max(map(len, found)) <= 1010
    assert len([each for each in found if each]) >= 4


def test_marks_are_not_spoken() -> None:
    text = "# Title\n\n- **One** `two`\n> three [four](http://five)\n---\n2 * 3 - 1, x-y"
    assert " ".join(without_marks(text).split()) == "Title One two three four 2 3 - 1, x-y"


@pytest.mark.parametrize("part", ["[", "![", "[a](", "[a](b", "*", "`", "\n- ", "#"])
def test_marks_are_found_in_time_that_grows_with_the_text(part: str) -> None:
    began = process_time()
    without_marks(part * (50_000 // len(part)))
    assert process_time() - began < 1
