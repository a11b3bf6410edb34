"""Text comes out whole and without stop strings, however the bytes are split."""

from __future__ import annotations

import time
from itertools import pairwise

import attrs
import pytest
from hypothesis import given, strategies as st

from trioserve.engine.detokenizer import Detokenizer, IndentStop
from trioserve.types import Aside


def stream(
    pieces: list[bytes], stops: tuple[str, ...] = (), aside: Aside | None = None
) -> tuple[list[str], str]:
    """Feed pieces; return what was shown after each, and the stop string that was found."""
    text = Detokenizer(stops, aside)
    shown = []
    for piece in pieces:
        shown.append(text.feed(piece))
        if text.stopping_word:
            return shown, text.stopping_word
    shown.append(text.flush())
    return shown, text.stopping_word


def test_characters_come_whole() -> None:
    shown, _ = stream(["é".encode()[:1], "é".encode()[1:], b"!"])
    assert shown == ["", "é", "!", ""]
    text = Detokenizer()
    wholes = []
    for byte in "aé€".encode():
        text.feed(bytes([byte]))
        wholes.append(text.is_whole)
    assert wholes == [True, False, True, False, False, True]


def test_bytes_that_never_become_a_character_are_replaced() -> None:
    assert stream([b"a", b"\xc3"])[0] == ["a", "", "\ufffd"]
    assert stream([b"a", b"\xff", b"b"])[0] == ["a", "\ufffd", "b", ""]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert stream([b"xabcd"], ("bcd", "abc")) == (["x"], "abc")
    assert stream([b"xabc"], ("bc", "abc")) == (["x"], "abc")


def test_an_unfinished_character_can_complete_a_stop_string() -> None:
    assert stream([b"a\xc3"], ("\ufffd",)) == (["a", ""], "\ufffd")


text = st.text(alphabet="ab\né€😀", max_size=12)


@given(text=text, stops=st.lists(text, max_size=3), data=st.data())
def test_the_split_does_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    edges = [0, *cuts, len(raw)]
    pieces = [raw[start:end] for start, end in pairwise(edges)]
    split, found = stream(pieces, tuple(stops))
    byte_by_byte, found_by_byte = stream([raw[i : i + 1] for i in range(len(raw))], tuple(stops))
    assert "".join(split) == "".join(byte_by_byte)
    assert found == found_by_byte
    if found:
        assert text.startswith("".join(split) + found)
    else:
        assert "".join(split) == text
        assert not any(stop and stop in text for stop in stops)


THINK = Aside("<think>", (("</think>",),))
BEGUN = attrs.evolve(THINK, begun="")
HARMONY = Aside("<|start|>", (("<|channel|>final",), ("<|message|>",)), "assistant")


@pytest.mark.parametrize(
    ("said", "stops", "aside", "stop"),
    [
        ("<think>a\n\nb</think>c|\n\nd", ("\n\n",), THINK, "\n\n"),
        ("\n\n<think>a\n\n</think>c|\n\n", ("\n\n",), THINK, "\n\n"),
        ("a.b</think>c|.d", (".",), BEGUN, "."),
        ("a</think>\n\nb|\n\n", ("\n\n",), BEGUN, "\n\n"),
        ("<think>a</think>b|</think>", ("</th",), BEGUN, "</th"),
        ("<think>a</think>b", ("</think>", "<think>", ">"), THINK, ""),
        ("<think>a</think>b\n<think>c.</think>d|.e", (".",), THINK, "."),
        ("a|.<think>b", (".",), THINK, "."),
        ("So <think> and|.", (".",), THINK, "."),
        ("So <think|> and", (">",), THINK, ">"),
        ("So `<think|>`", (">",), THINK, ">"),
        ("\n \nHi|.", (".",), THINK, "."),
        ("<think>never.ended", (".",), THINK, ""),
        (
            "<|channel|>analysis<|message|>a.<|end|><|start|>assistant<|channel|>final<|message|>b|.",
            (".", "final", "assistant"),
            HARMONY,
            ".",
        ),
        (
            "<|channel|>final<|message|>a<|start|>final.<|channel|>final<|message|>b|.",
            (".",),
            HARMONY,
            ".",
        ),
    ],
)
def test_stop_strings_count_in_the_answer(
    said: str, stops: tuple[str, ...], aside: Aside, stop: str
) -> None:
    shown, _, rest = said.rpartition("|") if stop else (said, "", "")
    raw = (shown + rest).encode()
    for length in (1, 2, 3, 99):
        pieces = [raw[i : i + length] for i in range(0, len(raw), length)]
        found, word = stream(pieces, stops, aside)
        assert ("".join(found), word) == (shown, stop)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "a", ".", "\n", "`", " "]), max_size=12),
    stops=st.sampled_from([(".",), ("\n\n", ">"), ("a.", "think")]),
    data=st.data(),
)
def test_the_split_does_not_matter_with_reasoning(
    text: list[str], stops: tuple[str, ...], data: st.DataObject
) -> None:
    raw = "".join(text).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    whole, found = stream([raw], stops, THINK)
    for edges in ([0, *cuts, len(raw)], range(len(raw) + 1)):
        pieces = [raw[start:end] for start, end in pairwise(edges)]
        shown, stop = stream(pieces, stops, THINK)
        assert ("".join(shown), stop) == ("".join(whole), found)


def test_many_stop_strings_cost_little_more_than_one() -> None:
    text = Detokenizer(tuple(f"{i:06d}" for i in range(100_000)))
    start = time.thread_time()
    shown = [text.feed(piece) for piece in [b" the", b"1234", b"5"] * 1000]
    assert time.thread_time() - start < 1  # 3 ms; a look at each of them took two minutes
    assert "".join(shown) + text.flush() == " the12345" * 1000


# -- outputs that end by their indentation

PIECES = st.lists(st.text(" \t\nab", max_size=5), max_size=12)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("return x", "return x"),  # the first line is the prompt's
        ("a\n    b\n    c", "a\n    b\n    c"),
        ("a\n    b\n  c", "a\n    b\n  "),
        ("a\n   b", "a\n   "),
        ("a\n\t\t\t\tb", "a\n\t\t\t\tb"),
        ("a\n    b\n\n    c", "a\n    b\n"),
        ("a\n      b", "a\n      b"),
        ("a\nb", "a\n"),
    ],
)
def test_a_line_with_too_few_blanks_ends_it(text: str, kept: str) -> None:
    stop = IndentStop(4)
    assert stop.cut(text) == kept
    assert stop.ended == (kept != text)


@given(PIECES, st.integers(1, 3))
def test_it_does_not_matter_how_the_text_is_split(pieces: list[str], least: int) -> None:
    whole, split = IndentStop(least), IndentStop(least)
    expected = whole.cut("".join(pieces))
    kept = ""
    for piece in pieces:
        kept += split.cut(piece)
        if split.ended:
            break
    assert (kept, split.ended) == (expected, whole.ended)
